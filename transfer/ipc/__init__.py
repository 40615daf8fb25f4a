"""Sharing memory and fences between processes."""
