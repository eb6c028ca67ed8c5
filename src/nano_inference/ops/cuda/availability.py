"""Checks of the device, driver, Triton and shapes for the CUDA kernels. This module must not import
packages that may be missing.
"""

import importlib.util
import os
import re
from collections.abc import Iterable

from nano_inference.arrays import Device, Dtype, dtype_name
from nano_inference.ops.settings import Latent

# Files of NVIDIA's driver: on Linux, on Jetson boards, and on Linux within Windows.
DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvmap", "/usr/lib/wsl/lib/libcuda.so.1")
MIN_CAPABILITY = (8, 0)  # supports bfloat16 products, with enough shared memory for the tiles
OVERLAP_CAPABILITY = (9, 0)  # supports programmatic dependent launch
MIN_TRITON = (3, 4)
MAX_HEAD_DIM = 512
MAX_RANK, MAX_ROTARY = 512, 128  # numbers of a latent, and rotated ones of its key
# heads of a delta rule, and tokens per block, which it computes in one tile
MAX_DELTA_HEAD, MAX_DELTA_BLOCK = 256, 32
DTYPES = ("bfloat16", "float16", "float32")


def problem_with(device: Device, dtype: Dtype, head_dims: Iterable[int]) -> str | None:
    """Return the reason why the kernels do not support this device, dtype or head dimensions. None:
    they do.
    """
    problem = problem_with_triton(device) or (
        problem_with_gpu(device) if device.type == "cuda" else None
    )
    if problem is None and dtype_name(dtype) not in DTYPES:
        problem = f"{dtype_name(dtype)} has no CUDA kernels; use bfloat16, float16 or float32."
    for head_dim in head_dims:
        if problem is None and (head_dim % 8 or head_dim > MAX_HEAD_DIM):
            problem = (
                f"head_dim={head_dim} has no CUDA kernels; they support multiples of 8 up to "
                f"{MAX_HEAD_DIM}."
            )
    return problem


def problem_with_latents(sizes: Latent) -> str | None:
    """Return the reason why the kernels do not support latents of these sizes. None: they do."""
    for name, size, most in (("rank", sizes.rank, MAX_RANK), ("rotary", sizes.rotary, MAX_ROTARY)):
        if size % 8 or size > most:
            return (
                f"latents with {name}={size} have no CUDA kernels; they support multiples of 8 up "
                f"to {most}."
            )
    return None


def problem_with_delta_rule(head_dims: Iterable[int], block_size: int) -> str | None:
    """Return the reason why the kernels of the delta rule do not support these head dimensions or
    blocks. None: they do.
    """
    widest = max(head_dims)
    if widest > MAX_DELTA_HEAD:
        return (
            f"heads of {widest} numbers have no CUDA kernels of the delta rule; they support up to "
            f"{MAX_DELTA_HEAD}."
        )
    if block_size > MAX_DELTA_BLOCK:
        return (
            f"block_size={block_size} has no CUDA kernels of the delta rule; use at most "
            f"{MAX_DELTA_BLOCK}."
        )
    return None


def problem_with_gpu(device: Device) -> str | None:
    """Return the reason why a GPU is too old. None: it is not."""
    import torch

    capability = torch.cuda.get_device_capability(device)
    if capability >= MIN_CAPABILITY:
        return None
    has, needs = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {has}; the kernels need "
        f"{needs} (Ampere)."
    )


def problem_with_overlap(device: Device) -> str | None:
    """Return the reason why kernels cannot overlap on a device. None: they can."""
    needs = ".".join(map(str, OVERLAP_CAPABILITY))
    if device.type != "cuda":
        return f"cuda_overlap needs a GPU of compute capability {needs}, not {device}."
    import torch

    capability = torch.cuda.get_device_capability(device)
    if capability >= OVERLAP_CAPABILITY:
        return None
    has = ".".join(map(str, capability))
    return (
        f"cuda_overlap needs compute capability {needs} (Hopper); "
        f"{torch.cuda.get_device_name(device)} has {has}."
    )


def problem_with_triton(device: Device) -> str | None:
    """Return the reason why Triton cannot compile for a device, or interpret on a CPU. None: it
    can.
    """
    needs = ".".join(map(str, MIN_TRITON))
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed; pip install 'triton>={needs}'."
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        has = version("triton")
    except PackageNotFoundError:  # Triton without package metadata
        has = ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", has)[:2])
    if numbers and numbers < MIN_TRITON:
        return (
            f"Triton {has} is too old; the kernels need {needs}: pip install -U 'triton>={needs}'."
        )
    interprets = _interprets()
    if device.type == "cpu" and not interprets:
        import torch

        message = (
            "its kernels need a GPU. For tests, set TRITON_INTERPRET=1 to run them on a CPU in "
            "Triton's interpreter."
        )
        return message if torch.cuda.is_available() else f"{message} Here {why_no_cuda()}"
    if device.type == "cuda" and interprets:
        return "Triton's interpreter is on; unset TRITON_INTERPRET."
    return None


def why_no_cuda() -> str:
    """Return torch's reason for finding no CUDA device."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA."
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as problem:
        reason = " ".join(str(problem).split())
        return f"torch {torch.__version__}: {reason}" + ("" if reason.endswith(".") else ".")
    return f"torch {torch.__version__} sees no CUDA device."


def has_nvidia_device() -> bool:
    """Return True if the system has an NVIDIA GPU, even if torch does not support it."""
    return any(map(os.path.exists, DRIVER_FILES))


def _interprets() -> bool:
    from triton import knobs  # Triton's own reading of the variable

    return bool(knobs.runtime.interpret)
