"""Vendor of the processor. Libraries choose their code by vendor, which decides the bits of
products.
"""

import functools
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}


@functools.cache
def vendor() -> str:
    """Return `intel` or `amd` on Linux, otherwise the machine type, such as `aarch64`."""
    try:
        with CPUINFO.open(encoding="ascii", errors="replace") as lines:
            head = lines.read(256)  # the first lines name the vendor
    except OSError:
        head = ""
    return next(
        (ours for name, ours in _VENDORS.items() if name in head), platform.machine().lower()
    )
