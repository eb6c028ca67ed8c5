"""`python -m tests.gpu.run [--dry-run] [--jobs N]`: the tests of this folder in several processes
at once.

Most of their time is Triton compiling kernels for the sizes of each tiny model, on one core; a
card's machine has more. What measures memory runs alone, at the end. Exit code 1 where a part
fails.
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


class Shard(NamedTuple):
    """Tests of one file whose names match an expression of `pytest -k`; together the shards of a
    file are all of it.
    """

    file: str
    matching: str = ""


TOGETHER = (
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
ALONE = (Shard("test_gpu_memory.py"),)


def run(shard: Shard, dry: bool) -> bool:
    """Run one; whether all is well."""
    # What warns only with some version of torch or a driver is no failure here.
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default", "--durations=3"]
    command = [sys.executable, "-m", "pytest", str(HERE / shard.file), *options]
    command += ["-k", shard.matching] if shard.matching else []
    command += ["--gpu-dry-run"] if dry else []
    began = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [
        line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("SKIPPED")
    ]
    name = " ".join(each for each in shard if each) or "all"
    print(
        f"-- {name}: exit code {done.returncode}, {time.monotonic() - began:.0f} s",
        *lines,
        sep="\n",
        flush=True,
    )
    return done.returncode == 0


def run_all(shards: Sequence[Shard], jobs: int, dry: bool) -> bool:
    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(lambda shard: run(shard, dry), shards)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="The tests of this folder in several processes at once."
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="toy sizes through Triton's interpreter on the CPU"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="processes at once; not given: as many as there are cores",
    )
    options = parser.parse_args()
    jobs = options.jobs or min(len(TOGETHER), os.cpu_count() or 1)
    if options.dry_run:  # nothing is compiled, and starting costs more than the tests
        return int(not run(Shard(""), dry=True))
    together = run_all(TOGETHER, jobs, dry=False)
    return int(not (run_all(ALONE, 1, dry=False) and together))


if __name__ == "__main__":
    sys.exit(main())
