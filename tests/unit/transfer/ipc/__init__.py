"""Unit tests of transfer.ipc."""
