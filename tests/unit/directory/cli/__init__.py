"""Unit tests of directory.cli."""
