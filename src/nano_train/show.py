"""A run as text: a line per step, tables, and curves."""

from nano_train.trainer import StepRecord


def line(record: StepRecord) -> str:
    """Return the figures of a step as a line."""
    parts = [f"step {record.step:3}: {record.seconds:.1f} s"]
    for name, value in (
        ("reward", record.reward),
        ("held out", record.held_out),
        ("KL", record.kl),
        ("loss", record.loss),
    ):
        if value is not None:
            parts.append(f"{name} {value:.3f}")
    parts.append(f"{record.tokens} tokens")
    if record.mismatch is not None:
        parts.append(f"largest difference to the trainer {record.mismatch:g}")
    return ", ".join(parts)
