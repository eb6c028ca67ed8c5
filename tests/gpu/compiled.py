"""Compilation without a GPU, one launch at a time: a driver that only names a target, and the
resource usage of a binary.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_LOAD = re.compile(r"\b(?:ld\.global\S*|cp\.async\.c[ag]\S*[^;]*)")
_WAIT = "griddepcontrol.wait"
# shared memory per program in bytes, by compute capability
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class Compiled:
    """One kernel of one launch. Sizes are in bytes. Instructions are those of its PTX, so a loop
    body counts once.
    """

    call: str
    shape: str
    kernel: str
    arch: int
    num_warps: int
    num_stages: int
    constants: dict[str, Any]
    registers: int
    stack: int  # mostly spilled registers
    local: int
    shared: int
    wgmma: int
    mma: int
    loads: int
    wide_loads: int  # 16 bytes each
    stores: int
    wide_stores: int
    ahead: int  # loads before the wait for the predecessor
    fuses: bool  # products and sums may be contracted


class _Driver:
    """A stand-in for Triton's driver that names the target. Each architecture has its own device
    number because Triton caches kernels by that number.
    """

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling(arch: int) -> Iterator[list[Any]]:
    """Make launches compile only. Yield the list that collects Triton's `CompiledKernel`s."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from nano_inference.ops.cuda import codes

    made: list[Any] = []
    run, before = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return made[-1]

    JITFunction.run = compile_only
    driver.set_active(_Driver(arch))  # type: ignore[arg-type]
    try:
        with patch.object(codes, "WITHOUT_CARD", arch):
            yield made
    finally:
        JITFunction.run = run
        driver._active = before


def describe(kernel: Any, call: str, shape: str, arch: int) -> Compiled:
    ptx, metadata, names = kernel.asm["ptx"], kernel.metadata, kernel.src.fn.arg_names
    usage = _resource_usage(kernel.asm["cubin"])
    constants = {
        names[path[0]]: value for path, value in kernel.src.constants.items() if len(path) == 1
    }
    loads = _LOAD.findall(ptx)
    stores = re.findall(r"\bst\.global\S*", ptx)
    return Compiled(
        call=call,
        shape=shape,
        kernel=metadata.name,
        arch=arch,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        constants={
            name: value
            for name, value in constants.items()
            if isinstance(value, int | float | str | None)
        },
        registers=usage["REG"],
        stack=usage["STACK"],
        local=usage["LOCAL"],
        shared=metadata.shared + usage["SHARED"],
        wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"),
        loads=len(loads),
        wide_loads=sum(map(_is_wide, loads)),
        stores=len(stores),
        wide_stores=sum(map(_is_wide, stores)),
        ahead=len(_LOAD.findall(ptx.partition(_WAIT)[0])) if _WAIT in ptx else 0,
        fuses=metadata.enable_fp_fusion is not False,
    )


def _is_wide(instruction: str) -> bool:
    return re.search(r"v4\.[bfsu]32|v2\.[bfsu]64|0x10", instruction) is not None


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return the resource usage that `cuobjdump`, which comes with Triton, reads from a kernel's
    binary.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run(
            [tool, "--dump-resource-usage", path],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    return {
        name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)
    }


def table(kernels: Iterable[Compiled]) -> str:
    """Format one line per kernel. `16 B` counts the loads and stores of that width."""
    head = (
        "call",
        "shape",
        "kernel",
        "sm",
        "warps",
        "regs",
        "spills",
        "shared",
        "mma",
        "16 B ld",
        "16 B st",
        "constants",
    )
    lines = [head]
    for k in kernels:
        mma = "wgmma" if k.wgmma else "mma" if k.mma else ""
        wide = (f"{k.wide_loads}/{k.loads}", f"{k.wide_stores}/{k.stores}")
        constants = " ".join(f"{name}={value}" for name, value in k.constants.items())
        numbers = (str(n) for n in (k.arch, k.num_warps, k.registers, k.stack + k.local, k.shared))
        lines.append((k.call, k.shape, k.kernel.strip("_"), *numbers, mma, *wide, constants))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*map(str.ljust, line, widths), line[-1]]).rstrip() for line in lines
    )
