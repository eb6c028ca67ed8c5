"""vLLM on a CPU, in vLLM's own environment: `python -m benchmarks.peers.vllm_worker SETTING`.

The setting is JSON: model, dtype, eager, batched_tokens, speculative. The starting process sets
threads and memory by environment variables.
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
    from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore

    speculative = setting["speculative"]

    llm = LLM(
        model=setting["model"],
        dtype=setting["dtype"],
        enforce_eager=setting["eager"],
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=setting["batched_tokens"],
        max_num_seqs=MAX_SEQUENCES,
        enable_prefix_caching=True,
        seed=0,
        speculative_config=speculative,
        disable_log_stats=not speculative,  # needed to count drafts
    )

    def counted(name: str) -> int:
        found = llm.get_metrics() if speculative else ()
        return sum(each.value for each in found if each.name == f"vllm:spec_decode_num_{name}")

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in question["requests"]]
        sampling = {"temperature": 1.0, "ignore_eos": True, **question["sampling"]}
        schema = sampling.pop("json_schema", None)
        if schema is not None:
            sampling["structured_outputs"] = StructuredOutputsParams(json=schema)
        params = [
            SamplingParams(n=n, max_tokens=length, detokenize=False, **sampling)
            for _, length, n in question["requests"]
        ]
        llm.reset_prefix_cache()
        drafted, accepted = counted("draft_tokens"), counted("accepted_tokens")
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return {
            "seconds": seconds,
            "tokens": tokens,
            "drafted": counted("draft_tokens") - drafted,
            "accepted": counted("accepted_tokens") - accepted,
        }

    serve(answers, answer, {"version": vllm.__version__})


if __name__ == "__main__":
    main()
