"""Tests of the shim against a real daemon and in worker processes."""
