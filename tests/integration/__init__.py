"""Integration tests: real processes, sockets and signals."""
