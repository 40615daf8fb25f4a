"""Unit tests of directory."""
