"""Requirements of a check on this machine, and the stages that are skipped without them."""

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.gpu.card import ask_driver, version_of
from benchmarks.gpu.models import weight_bytes
from benchmarks.gpu.scale import REAL
from nano_inference.system.c_compiler import c_compiler, compiler_problem

GIB = 1 << 30
CARD_FOR_LARGE = 40 * GIB
OLDEST_TORCH, OLDEST_TRITON, OLDEST_CARD = (2, 11), (3, 4), (8, 0)
STAGES = (
    "precompile",
    "smoke",
    "law",
    "tests",
    "sanitize",
    "rates",
    "engine",
    "variants",
    "large",
    "torch-loop",
    "kernels",
    "pdl",
    "sweep",
    "rl",
    "transformers",
    "races",
)
GRAMMARS = ("llguidance", "msgspec")  # required by requests with a grammar


@dataclass(frozen=True)
class Need:
    """A requirement.

    Attributes:
        what: Name of the requirement.
        found: Its version or size.
        problem: The problem, or None.
        skips: Stages that are skipped without it.
        fatal: True if nothing can run without it.
    """

    what: str
    found: str
    problem: str | None = None
    skips: tuple[str, ...] = ()
    fatal: bool = False


def find(out: Path, models: Path, *, dry_run: bool) -> list[Need]:
    """Check this machine's requirements."""
    found = [*packages(), *([] if dry_run else device()), compute_sanitizer(dry_run)]
    found += [] if dry_run else [compiler()]
    return [*found, *space(out, models, dry_run)]


def packages() -> list[Need]:
    """Check the Python packages."""
    required = dict.fromkeys(
        (
            *("torch", "triton", "numpy", "ml_dtypes", "safetensors", "tokenizers"),
            *("jinja2", "typer", "rich"),
        ),
        STAGES,
    )
    optional = {
        "pytest": ("law", "tests"),
        "httpx": ("law", "tests"),
        "hypothesis": ("tests",),
        "transformers": ("transformers",),
    }
    found: list[Need] = []
    for name, skips in (required | optional | dict.fromkeys(GRAMMARS, ())).items():
        absent = importlib.util.find_spec(name) is None
        problem = f"{name} is not installed" if absent else too_old(name, version_of(name))
        if problem and name in GRAMMARS:
            problem += ": no request of the tests has a grammar"
        found.append(Need(name, version_of(name), problem, skips, fatal=name in required))
    return found


def too_old(name: str, version: str) -> str | None:
    oldest = {"torch": OLDEST_TORCH, "triton": OLDEST_TRITON}.get(name)
    if oldest is None:
        return None
    numbers = tuple(
        int(number) for number in version.split("+")[0].split(".")[:2] if number.isdigit()
    )
    return (
        None
        if numbers >= oldest
        else f"{name} {version} is older than {'.'.join(map(str, oldest))}"
    )


def device() -> list[Need]:
    """Check the driver and the card."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        problem = (
            f"torch {torch.__version__} sees no CUDA device (driver: "
            f"{ask_driver('driver_version')})"
        )
        return [Need("CUDA device", "none", problem, STAGES, fatal=True)]
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    old = (
        f"compute capability {capability} is below {OLDEST_CARD}"
        if capability < OLDEST_CARD
        else None
    )
    free, total = torch.cuda.mem_get_info()
    memory = f"{total / GIB:.0f} GiB, {free / GIB:.0f} free"
    small = (
        f"card memory: {memory}; the 8B shape wants {CARD_FOR_LARGE / GIB:.0f} free"
        if free < CARD_FOR_LARGE
        else None
    )
    return [
        Need("CUDA device", properties.name, old, STAGES, fatal=True),
        Need("driver", ask_driver("driver_version")),
        Need("card memory", memory, small, ("large",)),
    ]


def compiler() -> Need:
    """Check the compiler that Triton builds its launchers with, unless they are cached."""
    return Need("C compiler", c_compiler() or "none", compiler_problem())


def compute_sanitizer(dry_run: bool) -> Need:
    """Check NVIDIA's memory access checker. A dry run launches the same kernels without it."""
    path = shutil.which("compute-sanitizer")
    problem = None if path or dry_run else "compute-sanitizer is not on the PATH"
    return Need("compute-sanitizer", path or "none", problem, ("sanitize", "races"))


def space(out: Path, models: Path, dry_run: bool) -> list[Need]:
    """Check disk and memory: the large model is written to a folder and read again."""
    needed = weight_bytes(REAL.large) + 2 * GIB
    disk = shutil.disk_usage(existing(models)).free
    memory = psutil.virtual_memory().available
    found: list[Need] = []
    for what, free in ((f"disk at {models}", disk), ("memory", memory)):
        short = free < needed and not dry_run
        problem = (
            f"{what}: {free / GIB:.1f} GiB free; the 8B shape wants {needed / GIB:.1f}"
            if short
            else None
        )
        found.append(Need(what, f"{free / GIB:.0f} GiB free", problem, ("large",)))
    return [*found, Need("folder of results", str(out))]


def existing(path: Path) -> Path:
    """Return the nearest existing parent folder."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def skipped(found: list[Need]) -> list[str]:
    """Return the skipped stages."""
    without = {stage for need in found if need.problem for stage in need.skips}
    return [stage for stage in STAGES if stage in without]


def text(found: list[Need]) -> str:
    """Format the missing requirements, then the skipped stages, then the fulfilled requirements."""
    problems = [need for need in found if need.problem]
    lines = [f"missing: {need.problem}" for need in problems] or ["missing: nothing"]
    lines.append(f"left out: {', '.join(skipped(found)) or 'nothing'}")
    return "\n".join([*lines, *(f"  {need.what:<20} {need.found}" for need in found)])
