"""The C compiler with which Triton builds the launchers of its kernels."""

import os
import shutil
import sysconfig
from pathlib import Path


def c_compiler() -> str | None:
    """Return the path of the C compiler that Triton uses, or None."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def compiler_problem() -> str | None:
    """Return the reason why Triton cannot build launchers. None: it can."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    there = (("C compiler", c_compiler()), (str(header), header.exists()))
    lacks = [name for name, found in there if not found]
    if not lacks:
        return None
    return f"Triton may not be able to launch anything: there is no {' and no '.join(lacks)}"
