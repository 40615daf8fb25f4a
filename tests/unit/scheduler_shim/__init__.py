"""Unit tests of scheduler_shim."""
