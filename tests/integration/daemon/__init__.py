"""Tests of a real daemon process over its real sockets."""
