"""Unit tests of directory.core."""
