"""Benchmarks against named peers: `python -m experiments.bench SUBJECT`."""
