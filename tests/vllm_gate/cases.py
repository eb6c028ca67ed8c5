"""Requests that are sent to vLLM's server and to ours. All are greedy or seeded, so the answers are
comparable.
"""

from dataclasses import dataclass
from typing import Any

NAME = "tiny"  # the model's name on both servers
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
IDS = [504, 3575, 282, 4649, 314]  # "The capital of France is"
TEXT = "The capital of France is"
USER = {"role": "user", "content": "What is the capital of France?"}


@dataclass(frozen=True)
class Case:
    """One request."""

    name: str
    path: str
    body: Any = None
    method: str = "POST"


def _case(path: str, base: dict[str, Any], name: str, more: dict[str, Any]) -> Case:
    body = base | more
    return Case(name, path, {key: value for key, value in body.items() if value is not LEFT_OUT})


LEFT_OUT = object()
_CHAT_BASE = {"model": NAME, "messages": [USER], "max_tokens": 4, "temperature": 0}
_BASE = {"model": NAME, "prompt": TEXT, "max_tokens": 4, "temperature": 0}
# sampled, but also the most probable tokens
_TWICE = {"n": 2, "temperature": 0.5, "top_k": 1, "seed": 1}
_STREAM = {"stream": True}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_CONTINUOUS = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
_TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
_HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
]

# Fields that both routes accept: name -> fields.
_SHARED: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": _TWICE,
    "n-greedy": {"n": 2},
    "stop": {"stop": ["e", "a"]},
    "stop-string": {"stop": "e"},
    "stop-ids": {"stop_token_ids": [260, 28]},
    "stop-kept": {"stop": ["e"], "include_stop_str_in_output": True},
    "min-tokens": {"min_tokens": 2},
    "ignore-eos": {"ignore_eos": True},
    "bias": {"logit_bias": {"504": 100}},
    "allowed": {"allowed_token_ids": [504, 3575]},
    "bad-words": {"bad_words": ["the"]},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "filters": {"temperature": 0.5, "top_p": 0.9, "top_k": 1, "min_p": 0.1, "seed": 1},
    "top-k-all": {"temperature": 0.5, "top_k": -1, "seed": 1, "max_tokens": 1},
    "token-ids": {"return_token_ids": True},
    "ids-as-names": {"return_tokens_as_token_ids": True},
    "specials-kept": {"skip_special_tokens": False},
    "prompt-logprobs-0": {"prompt_logprobs": 0},
    "prompt-logprobs-2": {"prompt_logprobs": 2},
    "user": {"user": "me"},
    "request-id": {"request_id": "mine"},
    "priority": {"priority": 0},
    "truncated": {"truncate_prompt_tokens": 3},
    "salt": {"cache_salt": "a"},
    "no-model": {"model": LEFT_OUT},
    "unknown-field": {"no_such_field": 1},
    "null-fields": {"stop": None, "seed": None, "logit_bias": None, "stream": None, "n": None},
    "stream": _STREAM,
    "stream-n": _STREAM | _TWICE,
    "stream-usage": _USAGE,
    "stream-usage-continuous": _CONTINUOUS,
    "stream-token-ids": _STREAM | {"return_token_ids": True},
    "stream-stop": _STREAM | {"stop": ["e"]},
    "stream-length-1": _STREAM | {"max_tokens": 1},
    # -- refused
    "wrong-model": {"model": "other"},
    "hot": {"temperature": -1},
    "top-p-over": {"top_p": 2},
    "top-k-under": {"top_k": -2},
    "min-p-over": {"min_p": 2},
    "no-samples": {"n": 0},
    "no-tokens": {"max_tokens": 0},
    "negative-tokens": {"max_tokens": -1},
    "too-many-tokens": {"max_tokens": 100_000},
    "tokens-as-text": {"max_tokens": "many"},
    "penalty-over": {"presence_penalty": 3},
    "repetition-zero": {"repetition_penalty": 0},
    "bias-over": {"logit_bias": {"504": 1000}},
    "bias-of-nothing": {"logit_bias": {"99999999": 1}},
    "allowed-none": {"allowed_token_ids": []},
    "allowed-outside": {"allowed_token_ids": [99999999]},
    "stop-empty": {"stop": [""]},
    "min-over-max": {"min_tokens": 10},
    "options-without-stream": {"stream_options": {"include_usage": True}},
    "prompt-logprobs-streamed": _STREAM | {"prompt_logprobs": 1},
    "prompt-logprobs-negative": {"prompt_logprobs": -2},
    "prompt-logprobs-all": {"prompt_logprobs": -1},
    "wrong-seed": {"seed": "x"},
}

_CHATS: dict[str, dict[str, Any]] = {
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    "named": {"messages": [USER | {"name": "ann"}]},
    "turns": {"messages": [USER, {"role": "assistant", "content": "Paris."}, USER]},
    "prefilled": {
        "messages": [USER, {"role": "assistant", "content": "It is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "no-generation-prompt": {"add_generation_prompt": False},
    "tools": {"tools": [_TOOL], "tool_choice": "none"},
    "tool-history": {"messages": _HISTORY},
    "max-completion-tokens": {"max_tokens": LEFT_OUT, "max_completion_tokens": 4},
    "echo": {"messages": [USER, {"role": "assistant", "content": "It is"}], "echo": True},
    "logprobs": {"logprobs": True},
    "logprobs-0": {"logprobs": True, "top_logprobs": 0},
    "logprobs-1": {"logprobs": True, "top_logprobs": 1},
    "logprobs-3": {"logprobs": True, "top_logprobs": 3},
    "logprobs-as-ids": {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True},
    "logprobs-all": {"logprobs": True, "top_logprobs": -1, "max_tokens": 1},
    "stream-logprobs": _STREAM | {"logprobs": True, "top_logprobs": 2},
    "stream-echo": _STREAM
    | {"messages": [USER, {"role": "assistant", "content": "It is"}], "echo": True},
    "documents": {"documents": [{"title": "a", "text": "b"}]},
    "template-arguments": {"chat_template_kwargs": {"a": 1}},
    "format-text": {"response_format": {"type": "text"}},
    "store": {"store": True},
    "parallel-calls": {"parallel_tool_calls": False},
    # -- refused
    "no-messages": {"messages": []},
    "messages-as-text": {"messages": "Hi"},
    "messages-left-out": {"messages": LEFT_OUT},
    "role-left-out": {"messages": [{"content": "Hi"}]},
    "picture": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        ]
    },
    "top-logprobs-alone": {"top_logprobs": 2},
    "top-logprobs-over": {"logprobs": True, "top_logprobs": 1000},
    "both-ends": {"add_generation_prompt": True, "continue_final_message": True},
    "tools-auto": {"tools": [_TOOL], "tool_choice": "auto"},
    "tool-choice-without-tools": {"tool_choice": "auto"},
    "template-of-theirs": {"chat_template": "{{ messages }}"},
}

_TEXTS: dict[str, dict[str, Any]] = {
    "ids": {"prompt": IDS},
    "texts": {"prompt": [TEXT, "Two"]},
    "many-ids": {"prompt": [IDS, [504]]},
    "texts-n": {"prompt": [TEXT, "Two"]} | _TWICE,
    "default-length": {"max_tokens": LEFT_OUT},
    "max-completion-tokens": {"max_tokens": LEFT_OUT, "max_completion_tokens": 4},
    "echo": {"echo": True},
    "echo-ids": {"prompt": IDS, "echo": True},
    "echo-special-ids": {"prompt": [1, *IDS], "echo": True},
    "echo-logprobs": {"echo": True, "logprobs": 2},
    "echo-logprobs-0": {"echo": True, "logprobs": 0},
    "echo-only": {"echo": True, "max_tokens": 0},
    "echo-only-logprobs": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "logprobs-0": {"logprobs": 0},
    "logprobs-1": {"logprobs": 1},
    "logprobs-3": {"logprobs": 3},
    "logprobs-all": {"logprobs": -1, "max_tokens": 1},
    "logprobs-as-ids": {"logprobs": 2, "return_tokens_as_token_ids": True},
    "logprobs-n": {"logprobs": 1} | _TWICE,
    "no-special-tokens": {"add_special_tokens": False},
    "stream-logprobs": _STREAM | {"logprobs": 2},
    "stream-echo": _STREAM | {"echo": True},
    "stream-echo-logprobs": _STREAM | {"echo": True, "logprobs": 1},
    "stream-texts": _STREAM | {"prompt": [TEXT, "Two"]},
    "stream-ids-token-ids": _STREAM | {"prompt": IDS, "return_token_ids": True},
    # -- refused
    "empty": {"prompt": ""},
    "empty-ids": {"prompt": []},
    "id-outside": {"prompt": [99999999]},
    "negative-id": {"prompt": [-1]},
    "mixed": {"prompt": ["a", 1]},
    "prompt-left-out": {"prompt": LEFT_OUT},
    "suffix": {"suffix": "x"},
    "logprobs-over": {"logprobs": 1000},
    "logprobs-true": {"logprobs": True},
    "too-long": {"prompt": IDS * 200},
}

_GENERATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": _TWICE,
    "logprobs-0": {"logprobs": 0},
    "logprobs-1": {"logprobs": 1},
    "logprobs-3": {"logprobs": 3},
    "prompt-logprobs": {"prompt_logprobs": 1},
    "stop-ids": {"stop_token_ids": [260, 28]},
    "seeded": {"temperature": 0.5, "top_k": 1, "seed": 1},
    "hot": {"temperature": -1},
    "wrong": {"max_tokens": "many"},
}


def _generate(name: str, more: dict[str, Any]) -> Case:
    params = {"max_tokens": 4, "temperature": 0} | more
    return Case(
        f"generate/{name}", GENERATE, {"model": NAME, "token_ids": IDS, "sampling_params": params}
    )


CASES = [
    *(_case(CHAT, _CHAT_BASE, f"chat/{name}", more) for name, more in (_SHARED | _CHATS).items()),
    *(
        _case(COMPLETIONS, _BASE, f"completions/{name}", more)
        for name, more in (_SHARED | _TEXTS).items()
    ),
    *(_generate(name, more) for name, more in _GENERATES.items()),
    Case(
        "generate/no-ids",
        GENERATE,
        {"model": NAME, "token_ids": [], "sampling_params": {"max_tokens": 1}},
    ),
    Case("generate/no-params", GENERATE, {"model": NAME, "token_ids": IDS}),
    Case("tokenize/text", "/tokenize", {"model": NAME, "prompt": TEXT}),
    Case(
        "tokenize/strings", "/tokenize", {"model": NAME, "prompt": TEXT, "return_token_strs": True}
    ),
    Case("tokenize/chat", "/tokenize", {"model": NAME, "messages": [USER]}),
    Case("tokenize/nothing", "/tokenize", {"model": NAME}),
    Case("tokenize/wrong-model", "/tokenize", {"model": "other", "prompt": TEXT}),
    Case("detokenize/ids", "/detokenize", {"model": NAME, "tokens": IDS}),
    Case("detokenize/outside", "/detokenize", {"model": NAME, "tokens": [99999999]}),
    Case("models", "/v1/models", method="GET"),
    Case("health", "/health", method="GET"),
    Case("ping", "/ping", method="GET"),
    Case("version", "/version", method="GET"),
    Case("load", "/load", method="GET"),
    Case("nowhere", "/v1/nowhere", method="GET"),
    Case("wrong-method", CHAT, method="GET"),
    Case("not-json", CHAT, b"{"),
    Case("a-list", CHAT, []),
]
