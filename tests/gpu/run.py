"""Run the tests of this folder in several processes.

    python -m tests.gpu.run [--law] [--out FOLDER] [--seconds N] [--jobs N] [--dry-run]

The memory tests need the whole card and run first. Each shard writes its output to OUT/NAME.txt
while it runs. It is stopped at its limit or when the total time is over, and its output so far is
kept. The exit code is 1 if a shard fails, is stopped, or has no time left.
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
THREADS = 2  # per process
PATIENCE = 5.0  # seconds between the stop request and the kill
STARTING = 10.0  # seconds: no shard starts with less time left
SHOWN_LINES = 40  # lines of a shard's output in the common log; its file has all
STOPPED = 124  # the exit code of `timeout`


class Shard(NamedTuple):
    """Tests of one file whose names match a `pytest -k` expression. The shards of a file cover it
    completely.
    """

    file: str
    matching: str = ""
    limit: float = 150.0  # seconds
    marked: bool = True  # only tests with the mark `gpu`

    @property
    def name(self) -> str:
        """Name of the shard's result file."""
        stem = self.file.removesuffix(".py").removeprefix("test_") or "all"
        return "-".join([stem, *self.matching.split()])


ALONE = (Shard("test_gpu_memory.py", limit=100.0),)
TOGETHER = (
    Shard("test_nccl.py", limit=100.0, marked=False),
    Shard("test_ipc.py", limit=100.0, marked=False),
    Shard("test_gpu_invariance.py", "updates and float32"),
    Shard("test_gpu_invariance.py", "updates and bfloat16"),
    Shard("test_gpu_invariance.py", "schedule and llama"),
    Shard("test_gpu_invariance.py", "schedule and gemma3"),
    Shard("test_gpu_invariance.py", "schedule and mistral"),
    Shard("test_gpu_invariance.py", "states"),
    Shard("test_gpu_engine.py"),
    Shard("test_gpu_parity.py", "float32_agrees"),
    Shard("test_gpu_parity.py", "bfloat16 and False"),
    Shard("test_gpu_parity.py", "bfloat16 and True"),
    Shard("test_gpu_parity.py", "greedy"),
    Shard("test_gpu_gradients.py"),
    Shard("test_gpu_kernels.py", "qwen3"),
    Shard("test_gpu_kernels.py", "8b"),
    Shard("test_gpu_kernels.py", "gemma3"),
    Shard("test_gpu_states.py"),
)
LAW = (
    *(Shard("test_gpu_law.py", f"product and {model}") for model in ("0.6b", "8b", "head")),
    *(Shard("test_gpu_law.py", f"attention and {model}") for model in ("0.6b", "8b", "gemma3")),
    Shard("test_gpu_law.py", "adapter"),
    Shard("test_gpu_law.py", "state"),
    Shard("test_gpu_law.py", "logprobs"),
    *(Shard("test_gpu_law_codes.py", name) for name in ("coded and 0.6b", "coded and 8b")),
    *(Shard("test_gpu_law_codes.py", name) for name in ("fused", "mxfp4")),
    Shard("test_gpu_law_gradients.py"),
)
OF_LAW = ("test_gpu_law.py", "test_gpu_law_codes.py", "test_gpu_law_gradients.py")
# A full dry run leaves these out: the law has a separate run, and the others need no card.
ELSEWHERE = (*OF_LAW, "test_triton_compile.py", "test_kernel_sets.py")


def command_of(shard: Shard, dry: bool) -> list[str]:
    """Return the command that runs a shard."""
    # Warnings that depend on the version of torch or the driver are not failures here.
    command = [sys.executable, "-m", "pytest", str(HERE / shard.file), "-v", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-W", "default", "--durations=3", "-rfE"]
    command += ["-m", "gpu"] if shard.marked else []
    command += ["-k", shard.matching] if shard.matching else []
    if not shard.file:
        command += [f"--ignore={HERE / name}" for name in ELSEWHERE]
    return [*command, "--gpu-dry-run"] if dry else command


def run(shard: Shard, out: Path, end: float, dry: bool) -> int:
    """Run one shard until `end` (`time.monotonic`) at the latest, and return its exit code."""
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
    """Run a command with its output streamed to a file. Return `STOPPED` if it had to
    be stopped.
    """
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
    parser.add_argument("--law", action="store_true", help="only the law; not given: all others")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # this process needs a moment to print the last results
    end = time.monotonic() + options.seconds - PATIENCE - 2
    jobs = options.jobs or min(len(TOGETHER), os.cpu_count() or 1)
    alone, together = ((), LAW) if options.law else (ALONE, TOGETHER)
    if options.dry_run:  # nothing is compiled, and startup costs more than the tests
        alone, together = tuple(map(Shard, OF_LAW)) if options.law else (Shard(""),), ()
    codes = run_all(alone, 1, options.out, end, options.dry_run)
    codes += run_all(together, jobs, options.out, end, options.dry_run)
    print(f"verdict: {codes.count(0)} of {len(codes)} shards", flush=True)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
