"""Training runs as file trees: a run can be killed at any time, resumed to the same bits, opened at
any step, compared with another run, and edited.
"""
