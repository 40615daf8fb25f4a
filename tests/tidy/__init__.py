"""Tests of the source itself: imports, file shape, forbidden constructs."""
