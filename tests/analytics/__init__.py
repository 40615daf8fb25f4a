"""Tests of directory.analytics and its commands."""
