"""What benchmarks make of their figures."""
