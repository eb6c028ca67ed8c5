"""Benchmarks on a CUDA device: `python -m benchmarks.gpu --help`. `scripts/gpu_check.sh` runs all
of them.
"""
