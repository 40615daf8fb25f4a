"""The `treecored` command."""
