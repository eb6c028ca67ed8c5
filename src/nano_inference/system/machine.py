"""Memory and cores that this process may use: those of the machine, reduced by the limits of
control groups (as set for containers and systemd units).
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

try:
    import resource
except ModuleNotFoundError:  # a system without resource limits
    resource = None

ROOT = Path("/")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a space or a similar character of a path in mountinfo


@dataclass(frozen=True, order=True, slots=True)
class FreeMemory:
    """Memory that a process can still allocate.

    Attributes:
        size: Size in bytes.
        limit: Name of the limit that sets it, for a sentence. Empty if it is the machine itself.
    """

    size: int
    limit: str = ""

    @property
    def told_limit(self) -> str:
        """Limit as an addition to a sentence, or an empty string."""
        return f" under {self.limit}" if self.limit else ""


def free_memory(root: Path = ROOT) -> FreeMemory:
    """Return the memory that this process can still allocate. The least of three limits applies:
    the machine's available memory, the memory left in this process's control group and all groups
    above it, and RLIMIT_AS.

    Files that a group has read count as free, as in the machine's own figure, because the system
    drops them when a process needs memory. Mapped files do not, since their pages are in use.

    Args:
        root: Root of the file system that holds `proc` and `sys`.
    """
    free = [FreeMemory(psutil.virtual_memory().available), *_left_in_groups(root)]
    if resource is not None:
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            taken = psutil.Process().memory_info().vms
            limit = "the limit of the address space (ulimit -v)"
            free.append(FreeMemory(max(most - taken, 0), limit))
    return min(free)


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of physical cores for threads that wait for each other, at least 1.

    A limit of 2.5 processors gives 2. A third thread would be suspended in the middle of a step,
    and the others would wait for it.
    """
    cores = len({_siblings(root, cpu) for cpu in _allowed_cpus()}) or _cores_of_others()
    return max(1, int(min(cores, _cpu_limit(root))))


def usable_cpus(root: Path = ROOT) -> int:
    """Return the number of processors for threads that do not wait for each other, at least 1."""
    cpus = len(_allowed_cpus()) or os.cpu_count() or 1
    return max(1, math.ceil(min(cpus, _cpu_limit(root))))


def _cores_of_others() -> int:
    """Return the number of physical cores on a system that does not report a process's affinity."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def _allowed_cpus() -> frozenset[int]:
    """Return the processors that this process may run on. Empty if they are not reported."""
    ask = getattr(os, "sched_getaffinity", None)
    return frozenset() if ask is None else frozenset(ask(0))


def _siblings(root: Path, cpu: int) -> str:
    """Return the list of processors that share a core, as a name of the core."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _text(topology / "thread_siblings_list") or f"cpu {cpu}"


# -- control groups: version 2 has all controllers in one tree, version 1 a tree for each ----------


def _left_in_groups(root: Path) -> Iterator[FreeMemory]:
    for group in _groups(root, ""):
        stat = _numbers(group / "memory.stat")
        cached = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        freed = max(cached - stat.get("file_mapped", 0), 0) + stat.get("slab_reclaimable", 0)
        for name in ("memory.max", "memory.high"):
            yield from _left(group, name, "memory.current", freed)
    for group in _groups(root, "memory"):
        stat = _numbers(group / "memory.stat")
        cached = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
        freed = max(cached - stat.get("total_mapped_file", 0), 0)
        yield from _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", freed)


def _left(group: Path, limit: str, usage: str, freed: int) -> Iterator[FreeMemory]:
    most, used = _number(group / limit), _number(group / usage)
    if most is not None and used is not None:
        left = most - max(used - freed, 0)
        yield FreeMemory(max(left, 0), f"{limit} of the control group")


def _cpu_limit(root: Path) -> float:
    """Return how many processors this process may keep busy, infinity without a limit."""
    shares = [math.inf]
    for group in _groups(root, ""):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            shares.append(int(quota) / max(int(period), 1))
    for group in _groups(root, "cpu"):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is not None and period is not None:  # None for -1: no quota
            shares.append(quota / max(period, 1))
    return min(shares)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's control group, then those of the groups above it.

    Args:
        root: Root of the file system.
        controller: Controller of version 1. Empty for the tree of version 2.
    """
    own_group = next(
        (
            path
            for _, names, path in _split(_text(root / "proc/self/cgroup"), ":", 3)
            if (controller in names.split(",") if controller else not names)
        ),
        None,
    )
    mounted = next(_mounts(root, controller), None)
    if own_group is None or mounted is None:
        return
    top, inside = mounted
    path = PurePosixPath(own_group)
    # A container may see its own group as the top of the tree, regardless of its path outside.
    is_below = path.is_relative_to(inside) and ".." not in path.parts
    group = top / path.relative_to(inside) if is_below else top
    yield from (each for each in (group, *group.parents) if each.is_relative_to(top))


def _mounts(root: Path, controller: str) -> Iterator[tuple[Path, str]]:
    """Yield each mount point of a controller's tree, and the group that is its top."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        wanted = kind[0] == "cgroup" and controller in kind[2].split(",")
        if wanted if controller else kind[0] == "cgroup2":
            inside, folder = (_ESCAPED.sub(_unescaped, each) for each in fields[3:5])
            yield root / folder.lstrip("/"), inside


def _unescaped(match: "re.Match[str]") -> str:
    return chr(int(match[1], 8))


def _split(text: str, separator: str, parts: int) -> Iterator[list[str]]:
    """Return the lines that split into exactly this number of parts."""
    lines = (line.split(separator, parts - 1) for line in text.splitlines())
    return (each for each in lines if len(each) == parts)


def _numbers(file: Path) -> Mapping[str, int]:
    """Return the numbers of a file with a name and a number per line."""
    pairs = _split(_text(file), " ", 2)
    return {name: int(value) for name, value in pairs if value.isdecimal()}


def _number(file: Path) -> int | None:
    """Return the number in a file. None for other text, such as `max`, or an unreadable file."""
    text = _text(file)
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    """Return the text of a file. Empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
