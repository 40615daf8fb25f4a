"""Unit tests of directory.protocol."""
