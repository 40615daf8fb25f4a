"""Tests that need a CUDA device; `make gpu` runs them and nothing else does."""
