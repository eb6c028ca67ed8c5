"""Launch every kernel at small shapes: `compute-sanitizer python tests/gpu/sanitize.py
[--dry-run]`.

Every tensor is an allocation of its own (torch's cache is off), so that an access beyond one is
seen. What nobody may read holds NaN. No graphs: what they replay is launched here, or where rows
are few by the probe of each engine.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

# torch reads it when it makes its first tensor
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
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
MODELS = {"qwen3": {"num_hidden_layers": 1}, "gemma3": GEMMA, "olmo2": {"num_hidden_layers": 1}}
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
    (
        [6] * 18,
        SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=True, prompt_top_logprobs=2),
    ),
)


def exercise(family: str, dtype: str, device: str, batch_invariant: bool) -> int:
    """Run the requests on a tiny model; returns steps."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder), family, **SIZES, **MODELS[family])
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
        )
        with InferenceEngine(config) as engine:
            for prompt, params in REQUESTS:
                engine.add_request(prompt, params, 2 if params.max_tokens == 3 else 1)
            steps = 0
            while engine.has_pending():
                poison(engine)
                engine.step()
                steps += 1
            return steps


def main() -> None:
    parser = argparse.ArgumentParser(description="Launch every kernel at small shapes.")
    parser.add_argument(
        "--dry-run", action="store_true", help="on the CPU, through Triton's interpreter"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="nothing is begun after so many"
    )
    options = parser.parse_args()
    if options.dry_run:
        interpret()
    device = "cpu" if options.dry_run else "cuda"
    dtypes = ("float32",) if options.dry_run else ("bfloat16", "float32")
    cases = [
        (family, dtype, exact) for dtype in dtypes for exact in (False, True) for family in MODELS
    ]
    began = time.monotonic()
    for place, (family, dtype, exact) in enumerate(cases[:2] if options.dry_run else cases):
        if time.monotonic() - began > options.seconds:
            print(f"no time is left for {len(cases) - place} of {len(cases)} cases", flush=True)
            break
        steps = exercise(family, dtype, device, exact)
        print(f"{family}, {dtype}, batch_invariant={exact}: {steps} steps", flush=True)


if __name__ == "__main__":
    main()
