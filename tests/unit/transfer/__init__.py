"""Unit tests of transfer."""
