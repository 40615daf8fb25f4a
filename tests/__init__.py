"""Tests of treecored."""
