"""Benchmarks of the engine: `python -m benchmarks --help`."""
