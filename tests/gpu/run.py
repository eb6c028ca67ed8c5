"""`python -m tests.gpu.run [--law] [--out FOLDER] [--seconds N] [--jobs N] [--dry-run]`: the tests of this
folder in several processes at once.

The tests of memory need the card to themselves and run first. Each shard writes to a file of its
own, OUT/NAME.txt, while it runs, and is stopped at its limit or when the time for all is over: what
it had printed is kept. Exit code 1 where a shard fails, is stopped, or finds no time.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
THREADS = 2  # of each process
PATIENCE = 5.0  # seconds that a shard has to end after it was asked to
STARTING = 10.0  # seconds: with less left a shard is not begun
SHOWN_LINES = 40  # of a shard's output in the common log; its file has all
STOPPED = 124  # exit code, as `timeout` has it


class Shard(NamedTuple):
    """Tests of one file whose names match an expression of `pytest -k`; together the shards of a
    file are all of it.
    """

    file: str
    matching: str = ""
    limit: float = 150.0  # seconds
    marked: bool = True  # only tests with the mark `gpu`

    @property
    def name(self) -> str:
        """As its file of results is called."""
        stem = self.file.removesuffix(".py").removeprefix("test_") or "all"
        return "-".join([stem, *self.matching.split()])


ALONE = (Shard("test_gpu_memory.py", limit=100.0),)
TOGETHER = (
    Shard("test_nccl.py", limit=100.0, marked=False),
    Shard("test_gpu_invariance.py", "updates and float32"),
    Shard("test_gpu_invariance.py", "updates and bfloat16"),
    Shard("test_gpu_invariance.py", "schedule and llama"),
    Shard("test_gpu_invariance.py", "schedule and gemma3"),
    Shard("test_gpu_invariance.py", "schedule and mistral"),
    Shard("test_gpu_engine.py"),
    Shard("test_gpu_parity.py", "float32_agrees"),
    Shard("test_gpu_parity.py", "bfloat16 and False"),
    Shard("test_gpu_parity.py", "bfloat16 and True"),
    Shard("test_gpu_parity.py", "greedy"),
    Shard("test_gpu_kernels.py", "qwen3"),
    Shard("test_gpu_kernels.py", "8b"),
    Shard("test_gpu_kernels.py", "gemma3"),
)
LAW = (
    *(Shard("test_gpu_law.py", f"product and {model}") for model in ("0.6b", "8b", "head")),
    *(Shard("test_gpu_law.py", f"attention and {model}") for model in ("0.6b", "8b", "gemma3")),
    Shard("test_gpu_law.py", "logprobs"),
)
# What the rest of a dry run leaves out: the law has a run of its own; the others need no card.
ELSEWHERE = ("test_gpu_law.py", "test_triton_compile.py", "test_kernel_sets.py")


def command_of(shard: Shard, dry: bool) -> list[str]:
    """What runs a shard."""
    # What warns only with some version of torch or a driver is no failure here.
    command = [sys.executable, "-m", "pytest", str(HERE / shard.file), "-v", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-W", "default", "--durations=3", "-rfE"]
    command += ["-m", "gpu"] if shard.marked else []
    command += ["-k", shard.matching] if shard.matching else []
    if not shard.file:
        command += [f"--ignore={HERE / name}" for name in ELSEWHERE]
    return [*command, "--gpu-dry-run"] if dry else command


def run(shard: Shard, out: Path, end: float, dry: bool) -> int:
    """Run one until `end` at most, by `time.monotonic`; returns its exit code."""
    seconds = min(shard.limit, end - time.monotonic()) if not dry else end - time.monotonic()
    if seconds < STARTING:
        print(f"-- {shard.name}: left out, no time is left", flush=True)
        return STOPPED
    began, path = time.monotonic(), out / f"{shard.name}.txt"
    code = run_command(command_of(shard, dry), path, seconds)
    ended = f"stopped after {seconds:.0f} s" if code == STOPPED else f"exit code {code}"
    lines = [
        each for each in path.read_text(errors="replace").splitlines() if "SKIPPED" not in each
    ]
    print(
        f"-- {shard.name}: {ended}, {time.monotonic() - began:.0f} s",
        *lines[-SHOWN_LINES:],
        sep="\n",
        flush=True,
    )
    return code


def run_command(command: Sequence[str], path: Path, seconds: float) -> int:
    """Run a command whose output goes to a file as it comes; `STOPPED` if it had to be stopped."""
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "PYTHONUNBUFFERED": "1"}
    with path.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return STOPPED


def run_all(shards: Sequence[Shard], jobs: int, out: Path, end: float, dry: bool) -> list[int]:
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda shard: run(shard, out, end, dry), shards))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="The tests of this folder in several processes at once."
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="toy sizes through Triton's interpreter on the CPU"
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu/shards"), help="of the outputs")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all shards together")
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="processes at once; not given: as many as there are cores",
    )
    parser.add_argument(
        "--law", action="store_true", help="only test_gpu_law.py; not given: all others"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # this process needs a moment to show what the last ones wrote
    end = time.monotonic() + options.seconds - PATIENCE - 2
    jobs = options.jobs or min(len(TOGETHER), os.cpu_count() or 1)
    alone, together = ((), LAW) if options.law else (ALONE, TOGETHER)
    if options.dry_run:  # nothing is compiled, and starting costs more than the tests
        alone, together = (Shard("test_gpu_law.py" if options.law else ""),), ()
    codes = run_all(alone, 1, options.out, end, options.dry_run)
    codes += run_all(together, jobs, options.out, end, options.dry_run)
    print(f"verdict: {codes.count(0)} of {len(codes)} shards", flush=True)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
