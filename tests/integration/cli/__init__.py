"""Tests of the commands as real processes."""
