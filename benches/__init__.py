"""Benchmarks for asv: what the guard costs, commit by commit."""
