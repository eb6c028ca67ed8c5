"""Who made the processor: libraries choose their code by that, and so the bits of a product."""

import functools
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}


@functools.cache
def vendor() -> str:
    """`intel` or `amd`, as Linux says; of others the kind of processor, such as `aarch64`."""
    try:
        with CPUINFO.open(encoding="ascii", errors="replace") as lines:
            head = lines.read(256)  # the first lines name the vendor
    except OSError:
        head = ""
    return next(
        (ours for name, ours in _VENDORS.items() if name in head), platform.machine().lower()
    )
