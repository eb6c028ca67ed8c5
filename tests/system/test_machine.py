"""Memory and cores under the limits of control groups, in trees laid out like the kernel's."""

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from nano_inference.system import machine
from nano_inference.system.machine import FreeMemory, free_memory, usable_cores, usable_cpus

GIB = 2**30
MOUNTS = """\
23 1 8:1 / / rw - ext4 /dev/root rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
"""
V2 = MOUNTS + "41 31 0:38 {top} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1 = (
    MOUNTS + "34 31 0:31 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


class Machine:
    """64 GiB, 16 processors on 8 cores, and a tree of control groups."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.cpus = root, {*range(16)}
        free = type("Memory", (), {"available": 64 * GIB})()
        monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: self.cpus, raising=False)
        for cpu in self.cpus:
            pair = f"{cpu % 8},{cpu % 8 + 8}"
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", pair)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def process(self, groups: str, mounts: str, top: str = "/") -> None:
        self.write("proc/self/cgroup", groups)
        self.write("proc/self/mountinfo", mounts.replace("{top}", top))

    def group(self, path: str, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{path}/{name}", text)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def v2(most: int | str, used: int, high: int | str = "max", stat: str = "") -> dict[str, str]:
    return {
        "memory.max": str(most),
        "memory.high": str(high),
        "memory.current": str(used),
        "memory.stat": stat,
    }


def v1(most: int, used: int, stat: str = "") -> dict[str, str]:
    return {
        "memory.limit_in_bytes": str(most),
        "memory.usage_in_bytes": str(used),
        "memory.stat": stat,
    }


def test_free_memory_without_cgroups_is_that_of_the_machine(fake: Machine) -> None:
    assert free_memory(fake.root) == FreeMemory(64 * GIB)
    assert free_memory(fake.root).told_limit == ""


def test_free_memory_is_the_remainder_of_the_container(fake: Machine) -> None:
    """In a separate namespace a container's group is the top of the tree."""
    fake.process("0::/", V2)
    fake.group("", v2(2 * GIB, GIB // 2))
    actual = free_memory(fake.root)
    assert actual == FreeMemory(GIB * 3 // 2, "memory.max of the control group")
    assert actual.told_limit == " under memory.max of the control group"


def test_free_memory_counts_files_that_can_be_dropped(fake: Machine) -> None:
    fake.process("0::/", V2)
    stat = f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB}\nfile_mapped {GIB // 2}\nslab_reclaimable 4096\nodd"
    fake.group("", v2(4 * GIB, 3 * GIB, stat=stat))
    assert free_memory(fake.root).size == GIB + 2 * GIB - GIB // 2 + 4096


def test_free_memory_respects_the_lower_threshold(fake: Machine) -> None:
    fake.process("0::/", V2)
    fake.group("", v2(4 * GIB, GIB, high=3 * GIB))
    assert free_memory(fake.root) == FreeMemory(2 * GIB, "memory.high of the control group")


def test_free_memory_is_the_least_of_all_groups_above(fake: Machine) -> None:
    """A systemd unit has no limit, but its slice has one."""
    fake.process("1:name=systemd:/x\n0::/user.slice/a.scope", V2)
    fake.group("user.slice/a.scope", v2("max", GIB))
    fake.group("user.slice", v2(8 * GIB, 5 * GIB))
    assert free_memory(fake.root).size == 3 * GIB
    fake.group("user.slice/a.scope", v2(2 * GIB, GIB))
    assert free_memory(fake.root).size == GIB


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/child", "/", "/other", "/../../x"])
def test_free_memory_finds_the_group_in_a_partial_mount(fake: Machine, path: str) -> None:
    fake.process(f"0::{path}", V2, top="/docker/abc")
    fake.group("", v2(4 * GIB, GIB))
    fake.group("child", v2(2 * GIB, GIB))
    assert free_memory(fake.root).size == (GIB if path.endswith("child") else 3 * GIB)


def test_free_memory_reads_groups_of_version_1(fake: Machine) -> None:
    fake.process("4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/", V1)
    unlimited = 9223372036854771712
    fake.group("memory", v1(unlimited, 9 * GIB))
    assert free_memory(fake.root) == FreeMemory(64 * GIB)
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\ntotal_mapped_file {GIB}"
    fake.group("memory/docker/abc", v1(4 * GIB, 3 * GIB, stat))
    assert free_memory(fake.root) == FreeMemory(
        2 * GIB, "memory.limit_in_bytes of the control group"
    )


def test_free_memory_of_a_group_over_its_limit_is_zero(fake: Machine) -> None:
    fake.process("0::/", V2)
    fake.group("", v2(GIB, 2 * GIB))
    assert free_memory(fake.root).size == 0


@pytest.mark.parametrize("text", ["", "nonsense", "0::", "31 23 0:28\n - \n"])
def test_free_memory_survives_unparsable_files(fake: Machine, text: str) -> None:
    fake.write("proc/self/cgroup", text)
    fake.write("proc/self/mountinfo", text)
    assert free_memory(fake.root) == FreeMemory(64 * GIB)


def test_free_memory_finds_a_mount_with_a_space(fake: Machine) -> None:
    fake.process(
        "0::/", V2.replace("/sys/fs/cgroup rw,relatime - cgroup2", r"/a\040b rw - cgroup2")
    )
    for name, text in v2(2 * GIB, GIB).items():
        fake.write(f"a b/{name}", text)
    assert free_memory(fake.root).size == GIB


def test_free_memory_respects_the_limit_of_the_address_space(
    fake: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (taken + 50 * GIB, resource.RLIM_INFINITY))
    actual = free_memory(fake.root)
    assert actual.limit == "the limit of the address space (ulimit -v)"
    assert 49 * GIB < actual.size < 51 * GIB


def test_free_memory_of_this_machine_is_sane() -> None:
    assert 0 <= free_memory().size <= psutil.virtual_memory().total


def test_usable_cores_are_physical(fake: Machine) -> None:
    assert usable_cores(fake.root) == 8
    assert usable_cpus(fake.root) == 16


def test_usable_cores_respect_process_affinity(fake: Machine) -> None:
    fake.cpus = {0, 8, 1, 9}
    assert (usable_cores(fake.root), usable_cpus(fake.root)) == (2, 4)
    fake.cpus = {0, 1, 2}
    assert (usable_cores(fake.root), usable_cpus(fake.root)) == (3, 3)


@pytest.mark.parametrize(
    ("most", "cores", "cpus"),
    [
        ("max 100000", 8, 16),
        ("250000 100000", 2, 3),
        ("50000 100000", 1, 1),
        ("1000000 100000", 8, 10),
        ("odd", 8, 16),
    ],
)
def test_usable_cores_respect_the_limit_of_a_group(
    fake: Machine, most: str, cores: int, cpus: int
) -> None:
    fake.process("0::/a/b", V2)
    fake.group("a/b", {"cpu.max": "max 100000"})
    fake.group("a", {"cpu.max": most})
    assert (usable_cores(fake.root), usable_cpus(fake.root)) == (cores, cpus)


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3)])
def test_usable_cores_respect_a_group_of_version_1(fake: Machine, quota: str, cores: int) -> None:
    fake.process("4:memory:/x\n1:cpu,cpuacct:/x", V1)
    fake.group("cpu,cpuacct/x", {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": "100000"})
    assert usable_cores(fake.root) == cores


def test_usable_cores_without_affinity_are_all_cores(
    fake: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 12 if logical else 6)
    assert usable_cores(fake.root) == 6
    fake.process("0::/", V2)
    fake.group("", {"cpu.max": "200000 100000"})
    assert usable_cores(fake.root) == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_usable_cores_of_a_process_pinned_to_one_core() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from nano_inference import EngineConfig; from nano_inference.device import backends;"
        "print(backends.num_threads(EngineConfig('m')))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "1"


def test_machine_without_limits_reports_none(
    fake: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    none: Any = None
    monkeypatch.setattr(machine, "resource", none)
    assert free_memory(fake.root) == FreeMemory(64 * GIB)
