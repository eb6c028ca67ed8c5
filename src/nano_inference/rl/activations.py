"""Activations of a backward pass: keep them, or keep each layer's input and recompute the layer."""

from typing import Any

from nano_inference.errors import ConfigError

KEPT_ROWS = 1024  # rows of a micro-batch whose activations are kept by default


def require_choice(value: Any) -> None:
    """Raise `ConfigError` unless the option is True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise ConfigError(
            f"recompute_activations={value!r} must be True, False or None (True above "
            f"{KEPT_ROWS:,} rows)."
        )


def recomputes(choice: bool | None, rows: int) -> bool:
    """Return True if a backward pass recomputes the layers of a micro-batch of this many rows.

    The choice changes memory and time, and no bit of a gradient.
    """
    return rows > KEPT_ROWS if choice is None else choice
