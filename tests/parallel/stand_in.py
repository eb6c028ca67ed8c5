"""Compiles the stand-in for NCCL, and lets this process and its children use it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nano_inference.parallel import nccl

SOURCE = Path(__file__).with_name("stand_in_nccl.c")
COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(
    COMPILER is None or not Path("/dev/shm").is_dir(), reason="there is no cc, or no /dev/shm"
)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the path of the library, which `NANO_INFERENCE_NCCL` names."""
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-O1", "-Wall", "-shared", "-fPIC", "-o", path, SOURCE], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(nccl.LIBRARY, os.fspath(path))
        nccl.library.cache_clear()
        yield path
    nccl.library.cache_clear()
    for folder in Path("/dev/shm").glob("stand-in-nccl-*"):
        shutil.rmtree(folder, ignore_errors=True)
