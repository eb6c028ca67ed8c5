"""Compile the kernels of the engines in a GPU check, in several processes.

    python -m tests.gpu.precompile [--jobs N] [--seconds N] [--arch 90] [--only WORD] [--dry-run]

You need no GPU: a stand-in for Triton's driver names the target, and the binaries are written to
Triton's cache (`TRITON_CACHE_DIR`). You can therefore build a cache for another machine. Triton
there uses it if its version and the folder's path are the same.

The cache lacks Triton's launchers: a C compiler builds those on the launching machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PARTS = 6  # processes per kernel set; an engine has about 80 kernels
CODES: dict[str, dict[str, Any]] = {
    "fp8 keys": {"kv_cache_dtype": "fp8"},
    "int8 weights": {"quantization": "int8"},
}
TINY = (
    *("llama", "gemma3", "mistral", "qwen3", "olmo2", "granite", "mixtral"),
    *("gemma4", "gemma4-moe", "deepseek-v3", "lfm2", "qwen3_5"),
)


def names_of_sets() -> list[str]:
    """Return the names of the sets (models, dtype, mode) in the order in which a check
    needs them.
    """
    exact = ("fast", "invariant")
    real = [f"{size}/bfloat16/{mode}" for size in ("small", "large") for mode in exact]
    tiny = [f"tiny/{dtype}/{mode}" for dtype in ("bfloat16", "float32") for mode in exact]
    codes = [f"small/bfloat16/fast/{each}" for each in CODES]  # of the stage "variants"
    experts = [f"experts/bfloat16/{mode}" for mode in exact]
    others = ["small/bfloat16/overlap", "small/bfloat16/training", *experts]
    return [*real, *codes, *tiny, *others]


def configs_of(models: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each config.json and its engine options. Tiny models share most of their kernels, so
    one process counts all of them. Experts are those of gpt-oss-20b, in MXFP4.
    """
    from benchmarks.gpu.scale import REAL
    from tests.gpu.kernel_sets import EXPERTS_CONFIG
    from tests.models.tiny import tiny_model

    if models == "experts":
        length = REAL.options["max_model_len"]
        return [(EXPERTS_CONFIG, {"max_model_len": length, "quantization": "file"})]

    if models in ("small", "large"):
        options = {"max_model_len": REAL.options["max_model_len"], "max_loras": 1}
        return [(getattr(REAL, models), options)]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for family in TINY:
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_model(Path(folder), family) / "config.json"
            options = {"max_batch_size": 64, "max_loras": 1}  # as in `Target`, and adapters
            cases.append((json.loads(path.read_text()), options))
    return cases


def compile_part(name: str, part: int, parts: int, arch: int) -> int:
    """Compile each `parts`-th kernel of a set; return the number of compiled kernels."""
    from tests.gpu.kernel_sets import KernelSet, engine_of, recording
    from tests.gpu.training_kernels import train

    models, dtype, mode, *codes = name.split("/")
    with recording(arch, lambda place: place % parts == part) as names:
        for config, options in configs_of(models):
            how = options | {"cuda_overlap": mode == "overlap"}
            how |= CODES[codes[0]] if codes else {}
            engine = engine_of(KernelSet(name, config, dtype, mode == "invariant", how))
            if mode == "training":
                train(engine.model, engine.cache.format)
            else:
                engine.start()
    return len(range(part, len(names), parts))


def work(only: str) -> Iterator[tuple[str, int, int]]:
    for name in names_of_sets():
        if only in name:
            for part in range(PARTS):
                yield name, part, PARTS


def run_one(name: str, part: int, parts: int, arch: int, end: float) -> str:
    """Compile a part in a subprocess and return its outcome."""
    left = end - time.monotonic()
    if left < 5:
        return "no time"
    command = [sys.executable, "-m", "tests.gpu.precompile", "--arch", str(arch)]
    command += ["--part", name, str(part), str(parts)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=left, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return "no time"
    if done.returncode:
        print(f"{name}, part {part}: {done.stderr[-600:]}", flush=True)
        return "failed"
    return done.stdout.split()[-1]


def compile_all(only: str, jobs: int, arch: int, seconds: float) -> int:
    """Compile all parts and return an exit code."""
    began = time.monotonic()
    parts = list(work(only))
    if not parts:
        print(f"no set of kernels has {only!r} in its name", flush=True)
        return 2
    with ThreadPoolExecutor(jobs) as pool:
        ended = list(
            pool.map(lambda each: run_one(each[0], each[1], each[2], arch, began + seconds), parts)
        )
    kernels = sum(int(each) for each in ended if each.isdecimal())
    print(
        f"verdict: {kernels} kernels of {len(parts)} parts by {jobs} processes in "
        f"{time.monotonic() - began:.0f} s; {ended.count('failed')} parts failed, "
        f"{ended.count('no time')} had no time",
        flush=True,
    )
    return int("failed" in ended)


def architecture() -> int:
    """Return ten times the compute capability of this GPU, or of an H100 if there is none."""
    import torch

    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def main() -> int:
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported
    parser = argparse.ArgumentParser(description="Compile kernels into Triton's cache.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--seconds", type=float, default=600.0, help="no part runs longer")
    parser.add_argument("--arch", type=int, help="90: an H100; not given: of the GPU here")
    parser.add_argument("--only", default="", metavar="WORD", help="sets whose names contain it")
    parser.add_argument("--dry-run", action="store_true", help="one part of one set")
    parser.add_argument("--part", nargs=3, metavar=("SET", "PART", "PARTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        name, part, parts = options.part
        print(compile_part(name, int(part), int(parts), options.arch))
        return 0
    if options.dry_run:
        print(
            "verdict: "
            + run_one("small/bfloat16/fast", 0, 40, 90, time.monotonic() + 240)
            + " kernels"
        )
        return 0
    arch = options.arch or architecture()
    return compile_all(options.only, options.jobs, arch, options.seconds - 5)


if __name__ == "__main__":
    sys.exit(main())
