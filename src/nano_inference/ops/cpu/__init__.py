"""The CPU backend: kernels in C++, built on first use, that give the same bits under every
schedule.
"""
