"""Peers: `transformers` with a static cache and with continuous batching, on the same card in the
same run.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.card import wait
from benchmarks.workloads import Workload

POLL = 1.0  # seconds


def load(folder: Path, device: str, dtype: str) -> Any:
    """Load the model without end tokens, so that it never ends a sequence."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model = model.to(device).eval()
    config = model.generation_config
    config.eos_token_id, config.bos_token_id, config.pad_token_id = None, None, 0
    return model


def static_generate(
    model: Any, prompts: Sequence[Sequence[int]], tokens: int, device: str, *, compiled: bool
) -> float:
    """Return the seconds of `generate` with a static cache and prompts of one length, optionally
    with its own torch.compile.
    """
    ids = torch.tensor([list(prompt) for prompt in prompts], device=device)
    wait(device)
    began = time.perf_counter()
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=True,
        temperature=0.6,
        top_k=0,
        cache_implementation="static",
        disable_compile=not compiled,
    )
    wait(device)
    seconds = time.perf_counter() - began
    if made.shape[1] != ids.shape[1] + tokens:
        raise RuntimeError(f"made {made.shape[1] - ids.shape[1]} tokens, not {tokens}.")
    return seconds


def continuous(model: Any, work: Workload, limit: float, **options: Any) -> tuple[float, int, int]:
    """Run a workload by continuous batching, for `limit` seconds at most.

    `options` are fields of `ContinuousBatchingConfig`, which chooses others by the card's memory.
    Returns seconds, tokens of the finished requests, and their number.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    settings = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(allow_block_sharing=False, **options)
    manager = model.init_continuous_batching(
        generation_config=settings, continuous_batching_config=batching
    )
    manager.start()
    finished = tokens = 0
    began = time.perf_counter()
    seconds = 0.0
    try:
        for request in work.requests:
            manager.add_request(list(request.prompt), max_new_tokens=request.max_tokens)
        while finished < len(work.requests) and time.perf_counter() - began < limit:
            result = manager.get_result(timeout=POLL)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("its thread ended.")
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.is_finished():
                finished += 1
                tokens += len(result.generated_tokens)
                seconds = time.perf_counter() - began
    finally:
        manager.stop(block=True, timeout=10, hard_stop=True)
    if not finished:
        raise RuntimeError(f"no request was finished in {limit:.0f} s.")
    return seconds, tokens, finished
