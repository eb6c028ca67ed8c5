"""A mark that skips tests of compiled kernels on machines without a compiler."""

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

HEADERS = Path(sysconfig.get_path("include")) / "Python.h"
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None or not HEADERS.exists(),
    reason="torch.compile needs a C++ compiler and Python's headers",
)
