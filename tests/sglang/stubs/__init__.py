"""Stand-ins that are put on the path, each found by its own name: see environments.py."""
