"""Unit tests: one folder a source package, one file a source module."""
