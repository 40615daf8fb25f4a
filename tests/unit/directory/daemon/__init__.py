"""Unit tests of directory.daemon."""
