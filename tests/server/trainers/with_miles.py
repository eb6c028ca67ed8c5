"""Run Miles' own code for `/generate`, unmodified: it requests, fills its `Sample`, and rescores
the sample.

Run as `python with_miles.py URL` in Miles' environment. Prints the resulting sample as JSON.
"""
# pyright: reportMissingImports=false

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

from miles.rollout.generate_utils.generate_endpoint_utils import (
    compute_request_payload,
    update_sample_from_response,
)
from miles.rollout.generate_utils.prefill_logprobs import (
    recompute_samples_rollout_logprobs_via_prefill,
)
from miles.utils import http_utils
from miles.utils.types import Sample

ARGS = SimpleNamespace(
    rollout_max_response_len=64,
    rollout_max_context_len=None,
    use_rollout_routing_replay=False,
    use_miles_router=False,
    sglang_speculative_algorithm=None,
    sglang_router_policy=None,
    recompute_logprobs_via_prefill=True,
    multi_lora=None,
    lora_rank=0,
    lora_adapter_path=None,
    rollout_num_gpus=1,
    rollout_num_gpus_per_engine=1,
    sglang_server_concurrency=8,
    use_distributed_post=False,
)
SAMPLING = {
    "temperature": 1.0,
    "top_p": 0.8,
    "top_k": -1,
    "stop": None,
    "stop_token_ids": None,
    "no_stop_trim": True,
}
PROMPT = [5, 6, 7]


async def ask(url: str, sample: Sample, max_new_tokens: int) -> dict[str, Any]:
    """Run one turn of the sample."""
    payload, status = compute_request_payload(
        ARGS,
        sample.tokens or PROMPT,
        SAMPLING | {"max_new_tokens": max_new_tokens, "ignore_eos": True},
    )
    assert payload is not None, status
    output = await http_utils.post(f"{url}/generate", payload, max_retries=1)
    await update_sample_from_response(ARGS, sample, payload, output, update_loss_mask=True)
    return output


async def main(url: str) -> None:
    http_utils.init_http_client(ARGS)
    sample = Sample(prompt="as ids")
    outputs = [await ask(url, sample, 6), await ask(url, sample, 4)]
    fields = {
        "tokens": sample.tokens,
        "sent": [token_id for output in outputs for token_id in output["output_ids"]],
        "response": sample.response,
        "texts": [output["text"] for output in outputs],
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask,
        "logprobs": sample.rollout_log_probs,
        "versions": sample.weight_versions,
        "status": sample.status.value,
        "cached": sample.prefix_cache_info.cached_tokens,
    }
    await recompute_samples_rollout_logprobs_via_prefill(
        ARGS, [sample], url=f"{url}/generate", sampling_params=SAMPLING
    )
    print(json.dumps(fields | {"scored": sample.rollout_log_probs}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
