"""`find_gpus`: the cards of this machine, and the requirements of the CUDA backend."""

from dataclasses import dataclass

import torch

from nano_inference.device.memory import gibibytes
from nano_inference.ops.cuda.availability import (
    problem_with_gpu,
    problem_with_triton,
    why_no_cuda,
)
from nano_inference.system.c_compiler import c_compiler, compiler_problem

SHARE_OF_OTHERS = 0.02  # of a card's memory: less is the driver's own


@dataclass(frozen=True)
class Requirement:
    """Package or program that the CUDA backend needs.

    Attributes:
        name: Its name.
        value: Its version or path, or "none".
        problem: Reason why it does not suffice. None: it does.
    """

    name: str
    value: str
    problem: str | None = None


@dataclass(frozen=True)
class Card:
    """A CUDA device.

    Attributes:
        device: Name for `EngineConfig.device`.
        name: Name of the card, with its slice if it is divided (MIG).
        capability: Compute capability.
        total, free: Bytes of memory.
        problem: Reason why the kernels cannot run on it. None: they can.
        note: Advice about its memory. None: it is free.
    """

    device: str
    name: str
    capability: str
    total: int
    free: int
    problem: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class GpuReport:
    """Requirements and cards."""

    requirements: tuple[Requirement, ...]
    cards: tuple[Card, ...]

    @property
    def usable(self) -> bool:
        """True if a card can run the kernels."""
        fit = all(each.problem is None for each in self.requirements)
        return fit and any(card.problem is None for card in self.cards)


def find_gpus() -> GpuReport:
    """Look for cards and requirements. Starts CUDA in this process, and runs nothing on a card."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return GpuReport(_requirements(), tuple(map(_card, range(count))))


def _requirements() -> tuple[Requirement, ...]:
    has_cuda = torch.cuda.is_available()
    cuda = torch.version.cuda
    triton = problem_with_triton(torch.device("cuda"))
    return (
        Requirement("torch", torch.__version__),
        Requirement("CUDA of torch", cuda or "none", None if has_cuda else why_no_cuda()),
        Requirement("Triton", _version("triton"), triton),
        Requirement("C compiler", c_compiler() or "none", compiler_problem()),
    )


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _card(index: int) -> Card:
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    common = {"device": str(device), "name": properties.name, "capability": capability}
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as problem:  # another process uses the card exclusively, or fills it
        reason = " ".join(str(problem).split())
        return Card(**common, total=properties.total_memory, free=0, problem=reason)
    taken = total - free
    note = None
    if taken > SHARE_OF_OTHERS * total:
        note = (
            f"other programs hold {gibibytes(taken)}; stop them, or use gpu_memory_utilization of "
            f"at most {free / total:.2f}"
        )
    problem = problem_with_gpu(device)
    return Card(**common, total=total, free=free, problem=problem, note=note)
