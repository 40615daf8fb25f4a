"""Unit tests of transfer.device."""
