"""Random operations of many schedulers on one directory, by the million (tests/storm/storm.py)."""
