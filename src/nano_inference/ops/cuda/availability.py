"""Whether the CUDA kernels can run here: device, driver, Triton and shapes. Nothing is imported
that may be missing.
"""

import importlib.util
import os
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

import torch

MIN_CAPABILITY = (8, 0)  # bfloat16 products, and shared memory enough for the tiles
MIN_TRITON = (3, 4)
MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def problem_with(device: torch.device, dtype: torch.dtype, head_dims: Iterable[int]) -> str | None:
    """Why the kernels cannot run on this device, for this dtype and these head dimensions; None:
    they can.
    """
    found = problem_with_triton(device) or (
        problem_with_gpu(device) if device.type == "cuda" else None
    )
    if found is None and dtype not in DTYPES:
        found = (
            f"{str(dtype).removeprefix('torch.')} has no CUDA kernels; bfloat16, float16 and "
            "float32 have."
        )
    for head_dim in head_dims:
        if found is None and (head_dim % 8 or head_dim > MAX_HEAD_DIM):
            found = (
                f"head_dim={head_dim} has no CUDA kernels; multiples of 8 up to "
                f"{MAX_HEAD_DIM} have."
            )
    return found


def problem_with_gpu(device: torch.device) -> str | None:
    """Why a GPU is too old; None: it is not."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= MIN_CAPABILITY:
        return None
    has, needs = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {has}; the kernels need "
        f"{needs} (Ampere)."
    )


def problem_with_triton(device: torch.device) -> str | None:
    """Why Triton cannot compile for a device, or interpret on a CPU; None: it can."""
    needs = ".".join(map(str, MIN_TRITON))
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed; pip install 'triton>={needs}'."
    try:
        has = version("triton")
    except PackageNotFoundError:  # one that came another way
        has = ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", has)[:2])
    if numbers and numbers < MIN_TRITON:
        return (
            f"Triton {has} is too old; the kernels need {needs}: pip install -U 'triton>={needs}'."
        )
    interprets = _interprets()
    if device.type == "cpu" and not interprets:
        told = (
            "its kernels need a GPU; on a CPU Triton's interpreter runs them, for tests, if "
            "TRITON_INTERPRET=1 is set."
        )
        return told if torch.cuda.is_available() else f"{told} Here {why_no_cuda()}"
    if device.type == "cuda" and interprets:
        return "Triton's interpreter is on; unset TRITON_INTERPRET."
    return None


def why_no_cuda() -> str:
    """In torch's words, why it sees no CUDA device."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA."
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as problem:
        told = " ".join(str(problem).split())
        return f"torch {torch.__version__}: {told}" + ("" if told.endswith(".") else ".")
    return f"torch {torch.__version__} sees no CUDA device."


def has_nvidia_device() -> bool:
    """Whether the system has a GPU of NVIDIA's, whatever torch makes of it."""
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/nvidia0")


def _interprets() -> bool:
    from triton import knobs  # as Triton itself reads it

    return bool(knobs.runtime.interpret)
