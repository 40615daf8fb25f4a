"""Property tests: random histories compared with a plain model."""
