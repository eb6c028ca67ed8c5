"""Use a server with renderers and verifiers: `python with_verifiers.py URL TOKENIZER_FOLDER`.

Run by an interpreter that has both packages. Prints the results as JSON.
"""
# pyright: reportMissingImports=false

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI, BadRequestError
from renderers import DefaultRendererConfig
from renderers.base import create_renderer, load_tokenizer
from renderers.client import OverlongPromptError, generate
from verifiers.v1 import EvalClientConfig, SamplingConfig, TrainClientConfig
from verifiers.v1.clients import resolve_client
from verifiers.v1.dialects import ChatDialect

URL, FOLDER = sys.argv[1:3]
MESSAGES = [{"role": "user", "content": "Hi there"}]
GREEDY = {"temperature": 0.0, "max_tokens": 6}


async def rendered() -> dict[str, Any]:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0)
    renderer = create_renderer(load_tokenizer(FOLDER), DefaultRendererConfig())
    ask = {"client": client, "renderer": renderer, "messages": MESSAGES, "model": "tiny"}
    told = {
        name: await generate(**ask, sampling_params=GREEDY, **more)
        for name, more in {"plain": {}, "salted": {"cache_salt": "7", "priority": 3}}.items()
    }
    masked = await generate(
        **ask, sampling_params={"top_k": 2, "return_sampling_mask": True, "max_tokens": 4}
    )
    refused: dict[str, str] = {}
    for name, more in {
        "too long": {"prompt_ids": [5] * 600},
        "a grammar": {"sampling_params": {"stop_regex": "a"}},
    }.items():
        try:
            await generate(**(ask | more))
        except (OverlongPromptError, BadRequestError) as problem:
            refused[name] = type(problem).__name__
    await client.close()
    return {
        "plain": plain(told["plain"]),
        "salted": plain(told["salted"]),
        "masked": plain(masked),
        "refused": refused,
    }


def plain(told: dict[str, Any]) -> dict[str, Any]:
    names = (
        "request_id",
        "prompt_ids",
        "completion_ids",
        "completion_logprobs",
        "finish_reason",
        "usage",
    )
    return {name: told[name] for name in (*names, "sampling_mask", "routed_experts")}


async def verified(kind: Any, **more: Any) -> list[dict[str, Any]]:
    """Run two turns of a conversation through one of the verifiers clients."""
    client = resolve_client(kind(base_url=f"{URL}/v1", api_key_var="NO_KEY", **more))
    messages, seen = [*MESSAGES], []
    for _ in range(2):
        sampling = SamplingConfig(**GREEDY, cache_salt="3")
        body = {"model": "tiny", "messages": messages, **GREEDY}
        reply = await client.get_response(ChatDialect(), body, sampling, "a session")
        messages += [
            {"role": "assistant", "content": reply.message.content},
            {"role": "user", "content": "Go on"},
        ]
        seen.append(reply.model_dump(mode="json"))
    await client.close()
    return seen


async def main() -> None:
    train = {"renderer": DefaultRendererConfig(), "renderer_model_name": FOLDER}
    seen = {
        "renderers": await rendered(),
        "train": await verified(TrainClientConfig, **train),
        "eval": await verified(EvalClientConfig),
    }
    print(json.dumps(seen))


asyncio.run(main())
