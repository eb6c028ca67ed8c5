"""`python -m benchmarks.peers.vllm_worker SETTING`: vLLM on a CPU. Runs in vLLM's own environment.

The setting is JSON: model, dtype, eager, batched_tokens. Threads and memory are told to vLLM by
environment variables, which whoever starts this sets.
"""

import json
import sys
import time
from typing import Any

from benchmarks.peers.channel import open_channel, serve

MAX_MODEL_LEN = 4352
MAX_SEQUENCES = 64


def main() -> None:
    answers = open_channel()
    setting = json.loads(sys.argv[1])
    import vllm  # pyright: ignore
    from vllm import LLM, SamplingParams  # pyright: ignore

    llm = LLM(
        model=setting["model"],
        dtype=setting["dtype"],
        enforce_eager=setting["eager"],
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=setting["batched_tokens"],
        max_num_seqs=MAX_SEQUENCES,
        enable_prefix_caching=True,
        seed=0,
        disable_log_stats=True,
    )

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in question["requests"]]
        params = [
            SamplingParams(
                n=n,
                max_tokens=length,
                temperature=1.0,
                ignore_eos=True,
                detokenize=False,
                **question["sampling"],
            )
            for _, length, n in question["requests"]
        ]
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return {"seconds": seconds, "tokens": tokens}

    serve(answers, answer, {"version": vllm.__version__})


if __name__ == "__main__":
    main()
