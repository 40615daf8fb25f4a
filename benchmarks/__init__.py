"""Benchmarks: one bench_*.py a question."""
