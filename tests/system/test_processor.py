"""The processor's vendor, and the numerics that depend on it."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nano_inference import EngineConfig
from nano_inference.device.backends import numerics_of
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.system import processor

CPUINFO = """processor\t: 0
vendor_id\t: {name}
model name\t: a processor
"""
NAMES = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "": platform.machine().lower()}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    processor.vendor.cache_clear()
    yield
    processor.vendor.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_reference_names_the_vendor_of_its_matmul(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    if name:
        (tmp_path / "cpuinfo").write_text(CPUINFO.format(name=name))
    assert processor.vendor() == NAMES[name]
    vectors = torch.backends.cpu.get_cpu_capability()
    if vectors in ("AVX2", "AVX512"):
        device, ops = torch.device("cpu"), reference_ops()
        for vendor, ends in (
            (ops, f"cpu-{NAMES[name]}-{vectors.lower()}"),
            (replace(ops, name="cpu"), "cpu"),
        ):
            assert numerics_of(EngineConfig("m"), vendor, torch.float32, device).device == ends


def test_mkl_order_is_pinned_only_on_intel_processors() -> None:
    """A value set by the caller is kept."""
    code = "import os, nano_inference as n; print(n.system.processor.vendor(), os.environ.get('MKL_CBWR'))"
    for setting in (None, "COMPATIBLE"):
        environment = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"}
        environment |= {} if setting is None else {"MKL_CBWR": setting}
        process = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        vendor, actual = process.stdout.split()
        assert actual == str(setting or ("AUTO,STRICT" if vendor == "intel" else None))
