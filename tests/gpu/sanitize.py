"""Launch every kernel at small shapes: `python tests/gpu/sanitize.py [--tool memcheck]
[--dry-run]`.

Every tensor is a separate allocation (torch's cache is off), so an out-of-bounds access is
detected. Unreadable memory holds NaN. Graphs are off: the selftest launches the kernels that graphs
replay, on few rows of plain and coded weights.

With `--tool` the cases run twice. The first run is plain and compiles the kernels. The second runs
under compute-sanitizer, so the tool spends its time on launches instead of Triton's compiler.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# torch reads it with the first tensor
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.device.selftest import check
from nano_inference.rl import PolicyModel
from tests.gpu.target import adapter_tensors
from tests.interpreter import interpret
from tests.invariance.scenario import poison
from tests.models.tiny import tiny_model

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
GEMMA = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA_4 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
}
CONV = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
DELTA = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 1},
    "gemma3": GEMMA,
    "olmo2": {"num_hidden_layers": 1},
    "gemma4": GEMMA_4,
    "deepseek-v3": {"num_hidden_layers": 2, "num_attention_heads": 4},
    "mixtral": {"num_hidden_layers": 1},
    "lfm2": CONV,
    "qwen3_5": DELTA,
}
REQUESTS = (
    ([5, 9, 2] * 12, SamplingParams(max_tokens=3, ignore_eos=True, seed=1)),
    ([7] * 3, SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0, top_logprobs=3)),
    (
        [8] * 21,
        SamplingParams(
            max_tokens=3, ignore_eos=True, top_k=5, top_p=0.8, min_p=0.01, raw_logprobs=True
        ),
    ),
    (
        [9] * 4,
        SamplingParams(max_tokens=2, ignore_eos=True, repetition_penalty=1.2, logit_bias={4: 1.0}),
    ),
    ([3] * 19, SamplingParams(max_tokens=2, ignore_eos=True, adapter="own")),
    (
        [6] * 18,
        SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=True, prompt_top_logprobs=2),
    ),
)


# Half of the cases hold codes of 8 bits in the weights and, if the family can, in the cache: int8
# with `batch_invariant`, and FP8 without it in these families.
IN_FP8 = ("gemma3", "gemma4", "qwen3_5")
PLAIN_KEYS = ("gemma4", "deepseek-v3")


def codes_of(family: str, batch_invariant: bool) -> dict[str, Any]:
    """Return the formats of a case's weights and keys."""
    in_fp8 = family in IN_FP8
    if in_fp8 == batch_invariant:
        return {}
    codes = {"quantization": "fp8" if in_fp8 else "int8"}
    return codes | ({} if family in PLAIN_KEYS else {"kv_cache_dtype": "fp8"})


def exercise(family: str, dtype: str, device: str, batch_invariant: bool) -> int:
    """Run the requests on a tiny model and return the number of steps."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder), family, **SIZES | MODELS[family])
        config = EngineConfig(
            model_path=str(model),
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            device=device,
            backend="cuda",
            batch_invariant=batch_invariant,
            max_batch_size=8,
            max_chunk_tokens=17,
            block_size=16,
            kv_cache_memory=1 << 18,
            cuda_graphs=False,
            max_loras=1,
            **codes_of(family, batch_invariant),
        )
        with InferenceEngine(config) as engine:
            engine_model = engine.model
            if device != "cpu":  # takes seconds in the interpreter
                check(engine_model.ops, engine_model.spec, engine_model.dtype, engine_model.device)
            engine.load_adapter("own", adapter_tensors(model, 1))
            for prompt, params in REQUESTS:
                engine.add_request(prompt, params, 2 if params.max_tokens == 3 else 1)
            steps = 0
            while engine.has_pending():
                poison(engine)
                engine.step()
                steps += 1
            if engine.spec.state is None:  # otherwise there are no gradients
                train(engine)
            return steps


def train(engine: InferenceEngine) -> None:
    """Differentiate the logprobs of a prompt with two continuations."""
    policy = PolicyModel(engine)
    logprobs = policy.logprobs([[5, 9, 2] * 7, [5, 9, 2] * 4 + [7], [5, 9, 2, 8, 8]])
    torch.cat(logprobs).sum().neg().backward()
    policy.close()


class Case(NamedTuple):
    """A model and its engine settings."""

    family: str
    dtype: str
    batch_invariant: bool


def cases_of(dry_run: bool) -> list[Case]:
    """Return all cases. The first four cover both dtypes, invariant and not, in case
    time is short.
    """
    if dry_run:
        return [
            Case(family, "float32", exact) for family, exact in (("qwen3", True), ("gemma3", False))
        ]
    families = list(MODELS)
    return [
        Case(families[(turn + place) % len(families)], dtype, exact)
        for turn in range(len(families))
        for place, (dtype, exact) in enumerate(
            (dtype, exact) for dtype in ("bfloat16", "float32") for exact in (False, True)
        )
    ]


def run_cases(cases: Sequence[Case], seconds: float, device: str) -> None:
    """Run cases until the time is over. Print the number of finished cases after each."""
    began = time.monotonic()
    for done, case in enumerate(cases, start=1):
        steps = exercise(case.family, case.dtype, device, case.batch_invariant)
        print(f"{case.family}, {case.dtype}, batch_invariant={case.batch_invariant}: {steps} steps")
        print(f"verdict: {done} of {len(cases)} cases", flush=True)
        if time.monotonic() - began > seconds:
            break


def under(tool: str, seconds: float, dry_run: bool) -> int:
    """Run the cases plainly, then under a tool of compute-sanitizer, and return its exit code."""
    again = [sys.executable, __file__, "--seconds", str(seconds), *["--dry-run"][: int(dry_run)]]
    if dry_run:  # nothing is compiled, and there is no tool
        return subprocess.run(again, check=False).returncode
    began = time.monotonic()
    warm = subprocess.run(again, check=False, capture_output=True, text=True)
    print(
        f"without the tool: {time.monotonic() - began:.0f} s, exit code {warm.returncode}",
        flush=True,
    )
    if warm.returncode:
        print(warm.stdout, warm.stderr, sep="\n", flush=True)
        return warm.returncode
    # The tool would also trace the compilers and drivers that Triton starts, and slow them down.
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only"]
    command += ["--report-api-errors", "no", "--error-exitcode", "9"]
    return subprocess.run([*command, *again], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Launch every kernel at small shapes.")
    parser.add_argument(
        "--dry-run", action="store_true", help="on the CPU, through Triton's interpreter"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="no case is begun after so many"
    )
    parser.add_argument(
        "--tool", choices=("memcheck", "racecheck", "initcheck"), help="of compute-sanitizer"
    )
    options = parser.parse_args()
    if options.tool:
        return under(options.tool, options.seconds, options.dry_run)
    if options.dry_run:
        interpret()
    device = "cpu" if options.dry_run else "cuda"
    run_cases(cases_of(options.dry_run), options.seconds, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
