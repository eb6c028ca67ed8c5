"""`python -m tests.parity.run`: run the whole parity check and print a JSON summary."""

import argparse
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from tests.parity.compare import (
    MODEL,
    TOLERANCE,
    agreement,
    compare_rows,
    complete,
    oracle_of,
    prompts,
)

COMMON: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "kv_cache_memory": 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, default=None, help="where to write the summary")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tokens", type=int, default=64, help="completion tokens of a prompt")
    arguments = parser.parse_args()
    model = arguments.model
    began = time.perf_counter()
    with InferenceEngine(EngineConfig(model_path=model, dtype="float32", device="cpu")) as engine:
        token_ids = prompts(engine)
        params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
        greedy, _ = complete(engine, token_ids, params, 1, preempted=False)
    result = agreement(oracle_of(model), greedy)
    print(result, flush=True)
    rows = [
        row
        for dtype in ("float32", "bfloat16")
        for row in compare_rows(
            model, dtype, [*token_ids[:7], token_ids[-1][:700]], 16, report=print, **COMMON
        )
    ]
    summary = {
        "model": model,
        "oracle": "transformers float32, teacher-forced",
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - began, 1),
        "agreement": asdict(result),
        "rows": rows,
    }
    if arguments.log is not None:
        arguments.log.write_text(json.dumps(summary, indent=2) + "\n")
    good = result.tokens_equal == result.tokens and result.largest_difference <= TOLERANCE
    if not good or any(row["equal"] != row["samples"] for row in rows):
        raise SystemExit("parity is broken")
    print(
        f"parity holds: {result.tokens} tokens, largest difference {result.largest_difference:.1e}"
    )


if __name__ == "__main__":
    main()
