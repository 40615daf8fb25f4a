"""Devices behind one protocol: what a copy engine needs of each."""
