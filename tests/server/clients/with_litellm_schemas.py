"""LiteLLM: by a schema and by a forced tool, whole and streamed, in both protocols."""
# pyright: reportMissingImports=false

import json

import litellm
from asked import MODEL, TEXT, URL, Pet, tell

litellm.suppress_debug_info = True
ASK = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 300, "api_key": "none"}
CHAT = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", **ASK}
MESSAGES = {"model": f"anthropic/{MODEL}", "api_base": URL, **ASK}
PARAMETERS = Pet.model_json_schema()
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "pet", "strict": True, "schema": PARAMETERS},
}
TOOL = {
    "tools": [{"type": "function", "function": {"name": "pet", "parameters": PARAMETERS}}],
    "tool_choice": {"type": "function", "function": {"name": "pet"}},
}


def message(**more: object) -> litellm.Message:
    return litellm.completion(**more).choices[0].message


def content(**more: object) -> dict:
    return json.loads(message(**more).content)


def called(**more: object) -> dict:
    (call,) = message(**more).tool_calls
    return json.loads(call.function.arguments)


def streamed(**more: object) -> dict:
    chunks = litellm.completion(**more, stream=True)
    return json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


tell(
    model=content(**CHAT, response_format=Pet),
    schema=content(**CHAT, response_format=FORMAT),
    streamed=streamed(**CHAT, response_format=FORMAT),
    tool=called(**CHAT, **TOOL),
    messages=content(**MESSAGES, response_format=FORMAT),
    messages_tool=called(**MESSAGES, **TOOL),
)
