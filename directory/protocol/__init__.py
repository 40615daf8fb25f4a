"""Wire messages between a scheduler's shim and the daemon, and their reliable stream."""
