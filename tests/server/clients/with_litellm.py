"""Use a server with LiteLLM. Run by a separate interpreter, because LiteLLM needs an older
openai.
"""
# pyright: reportMissingImports=false

import asyncio
import json
import sys

import litellm

litellm.suppress_debug_info = True
URL = sys.argv[1]
KEY = "sk-test"
OPENAI = {"model": "openai/smollm2-135m", "api_base": f"{URL}/v1", "api_key": KEY}
ANTHROPIC = {"model": "anthropic/smollm2-135m", "api_base": URL, "api_key": KEY}
TEXT = {"model": "text-completion-openai/smollm2-135m", "api_base": f"{URL}/v1", "api_key": KEY}
ASK = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 12,
}


def whole(route: dict) -> dict:
    reply = litellm.completion(**route, **ASK)
    assert isinstance(reply, litellm.ModelResponse)
    return {
        "text": reply.choices[0].message.content,
        "finish": reply.choices[0].finish_reason,
        "prompt": reply.usage.prompt_tokens,
        "completion": reply.usage.completion_tokens,
    }


def streamed(route: dict) -> dict:
    chunks = list(
        litellm.completion(**route, **ASK, stream=True, stream_options={"include_usage": True})
    )
    usage = next(chunk.usage for chunk in chunks if getattr(chunk, "usage", None))
    return {
        "text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "finish": [
            c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason
        ][-1],
        "prompt": usage.prompt_tokens,
        "completion": usage.completion_tokens,
    }


async def awaited(route: dict) -> str:
    reply = await litellm.acompletion(**route, **ASK)
    return reply.choices[0].message.content


def refused(route: dict, **changes: object) -> str:
    try:
        litellm.completion(**route, **{**ASK, **changes}, num_retries=0)
    except Exception as problem:
        return type(problem).__name__
    return "nothing"


def text() -> str:
    reply = litellm.text_completion(
        **TEXT, prompt="The capital of France is", temperature=0, max_tokens=4
    )
    return reply.choices[0].text


seen = {
    "chat": whole(OPENAI),
    "chat_streamed": streamed(OPENAI),
    "chat_awaited": asyncio.run(awaited(OPENAI)),
    "messages": whole(ANTHROPIC),
    "messages_streamed": streamed(ANTHROPIC),
    "text": text(),
    "too_hot": refused(OPENAI, temperature=3),
    "too_long": refused(OPENAI, max_tokens=10**6),
    "wrong_key": refused(OPENAI | {"api_key": "sk-wrong"}),
    "wrong_key_messages": refused(ANTHROPIC | {"api_key": "sk-wrong"}),
    "wrong_model": refused(OPENAI | {"model": "openai/none"}),
}
print(json.dumps(seen))
