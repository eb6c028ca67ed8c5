"""The CPU backend: C++ kernels, built on first use, that produce the same bits under every
schedule.
"""
