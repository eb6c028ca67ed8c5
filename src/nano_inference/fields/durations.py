"""Durations as text, such as `10m` or `1h30m`, as Go and Ollama write them."""

import math
import re

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|ms|s|m|h|d)")
_WHOLE = re.compile(rf"(-?)((?:{_PART.pattern})+)")


def parse_duration(text: str | float) -> float:
    """Return the seconds of a duration: a number of seconds, or text such as `90`, `10m` or
    `1h30m`. Raises `ValueError` for anything else.
    """
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(f"{text!r} is not a duration.")
    try:
        seconds = float(text)
    except ValueError:
        whole = _WHOLE.fullmatch(str(text).strip().lower())
        if whole is None:
            raise ValueError(
                f"{text!r} is not a duration; write seconds, or a number with s, m or h."
            ) from None
        size = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(whole[2]))
        seconds = -size if whole[1] else size
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a finite duration.")
    return seconds
