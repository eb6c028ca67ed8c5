"""Budgets of thought, bad words and thoughts of earlier turns over HTTP, with real clients."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, BadRequestError
from openai import OpenAI

from nano_inference import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_llama
from tests.server.streams import post

# a thought of an earlier turn is kept if `preserve_thinking` is set, as in Qwen3.6's template
TEMPLATE = """\
{%- for m in messages -%}
{%- set thought = m.reasoning_content is defined and preserve_thinking is defined -%}
{{- "[" + m.role + "]" + ("<think>" + m.reasoning_content + "</think>" if thought else "") -}}
{{- m.content + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "[assistant]<think>" + ("</think>" if enable_thinking is false else "") -}}
{%- endif -%}
"""
FORGETFUL = TEMPLATE.replace("preserve_thinking is defined", "false")
ASKED: list[Any] = [{"role": "user", "content": "1+1"}]
BUDGET, MARKER = 5, 8  # a token for each byte
TURNS: list[Any] = [
    *ASKED,
    {"role": "assistant", "content": "2", "reasoning_content": "one more"},
    {"role": "user", "content": "2+2"},
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tiny_llama(tmp_path_factory.mktemp("thinking"), max_position=1024)
    write_tokenizer(folder, TEMPLATE)
    config = EngineConfig(str(folder), device="cpu", num_threads=1, kv_cache_memory=2**22)
    with running_server(
        config, ServerConfig(port=0, in_process=True, rl=True, served_model_name="any")
    ) as url:
        yield url


@pytest.fixture(scope="module")
def plain_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model without thoughts."""
    folder = tiny_llama(tmp_path_factory.mktemp("plain"), max_position=512)
    write_tokenizer(folder, "{% for m in messages %}{{ m.content }}{% endfor %}")
    config = EngineConfig(str(folder), device="cpu", num_threads=1, kv_cache_memory=2**22)
    with running_server(
        config, ServerConfig(port=0, in_process=True, rl=True, served_model_name="any")
    ) as url:
        yield url


def chat(url: str, status: int = 200, **fields: Any) -> Any:
    body = {"messages": ASKED, "max_tokens": 40, "seed": 1, "return_token_ids": True} | fields
    return post(f"{url}/v1/chat/completions", body, status)


def thought_of(url: str, **fields: Any) -> int:
    """Return the number of tokens before the closing marker."""
    (choice,) = chat(url, **fields)["choices"]
    return tokens_of_thought(url, choice["token_ids"])


def tokens_of_thought(url: str, token_ids: list[int]) -> int:
    closes = post(f"{url}/tokenize", {"prompt": "</think>", "add_special_tokens": False})["tokens"]
    ends = (i for i in range(len(token_ids)) if token_ids[i : i + len(closes)] == closes)
    return next(ends, len(token_ids))


@pytest.mark.parametrize(
    "name",
    [
        "thinking_token_budget",
        "thinking_budget_tokens",
        "reasoning_budget_tokens",
        "thinking_budget",
    ],
)
def test_openai_client_sets_a_budget(url: str, name: str) -> None:
    assert thought_of(url) == 40
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "any", "messages": ASKED, "max_tokens": 40, "seed": 1}
        more = {name: BUDGET, "return_token_ids": True}
        answer: Any = client.chat.completions.create(**asked, logprobs=True, extra_body=more)
        (choice,) = answer.choices
        assert tokens_of_thought(url, choice.token_ids) == BUDGET
        forced = [each.logprob for each in choice.logprobs.content[BUDGET : BUDGET + MARKER]]
        assert forced == [0.0] * MARKER
        assert choice.message.content
        chunks = list(client.chat.completions.create(**asked, stream=True, extra_body=more))
        said: Any = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(each.content or "" for each in said) == choice.message.content
        thoughts = "".join(getattr(each, "reasoning_content", None) or "" for each in said)
        assert thoughts == choice.message.reasoning_content


def test_responses_client_sets_a_budget(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        body: Any = {"thinking_token_budget": BUDGET, "seed": 1}
        answer = client.responses.create(
            model="any", input="1+1", max_output_tokens=40, extra_body=body
        )
    assert [each.type for each in answer.output] == ["reasoning", "message"]


def test_anthropic_client_sets_a_budget(url: str) -> None:
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": "any", "messages": ASKED, "max_tokens": 40}
        for kind in ("enabled", "adaptive"):
            thinking: Any = {"type": kind, "budget_tokens": BUDGET}
            answer = client.messages.create(**asked, thinking=thinking, extra_body={"seed": 1})
            assert [each.type for each in answer.content] == ["thinking", "text"]
        # Claude Code's budget is one less than max_tokens: an answer still fits
        thinking = {"type": "enabled", "budget_tokens": 39}
        answer = client.messages.create(**asked, thinking=thinking, extra_body={"temperature": 0})
        assert next(each.type for each in answer.content) == "thinking"
        assert answer.usage.output_tokens == 40
        with pytest.raises(BadRequestError, match="contradict each other"):
            client.messages.create(
                **asked, thinking=thinking, extra_body={"thinking_token_budget": 3}
            )


def test_anthropic_budget_is_harmless_without_thoughts(plain_url: str) -> None:
    with Anthropic(base_url=plain_url, api_key="none", max_retries=0) as client:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        answer = client.messages.create(
            model="any", messages=ASKED, max_tokens=8, thinking=thinking, extra_body={"seed": 1}
        )
    assert [each.type for each in answer.content] == ["text"]


def test_sglang_and_vllm_routes_set_a_budget(url: str) -> None:
    ids = post(f"{url}/tokenize", {"prompt": "1+1<think>"})["tokens"]
    sampling = {"max_new_tokens": 40, "sampling_seed": 1}
    for more, custom in (
        ({"max_thinking_tokens": BUDGET}, {}),
        ({}, {"custom_params": {"thinking_budget": BUDGET}}),
    ):
        body = {"input_ids": ids, "sampling_params": sampling | custom} | more
        answer = post(f"{url}/generate", body)
        assert tokens_of_thought(url, answer["output_ids"]) == BUDGET
    body = {"prompt": ids, "max_tokens": 40, "seed": 1, "thinking_token_budget": BUDGET}
    (choice,) = post(f"{url}/v1/completions", body | {"return_token_ids": True})["choices"]
    assert tokens_of_thought(url, choice["token_ids"]) == BUDGET


def test_budgets_beyond_the_request_are_rejected(url: str, plain_url: str) -> None:
    for fields, words in (
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": 33}, "set at most 31, or raise max_tokens to at least 42"),
        ({"thinking_token_budget": 3, "thinking_budget": 4}, "contradict each other"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "enable_thinking contradicts"),
        ({"bad_words": [""]}, "bad_words holds ''"),
    ):
        for stream in (False, True):
            error = chat(url, 400, stream=stream, **fields)["error"]
            assert words in error["message"]
    assert "has thoughts" in chat(plain_url, 400, thinking_token_budget=3)["error"]["message"]
    assert thought_of(url, thinking_budget=-1) == 40  # in the APIs with these names: no limit


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_thinking_can_be_switched_off(url: str, fields: dict[str, Any]) -> None:
    (choice,) = chat(url, **fields)["choices"]
    assert not choice["message"].get("reasoning_content")
    assert chat(url, **fields)["prompt_token_ids"] != chat(url)["prompt_token_ids"]


def test_thoughts_of_earlier_turns_are_kept_or_stripped(url: str, plain_url: str) -> None:
    def prompt(**fields: Any) -> str:
        ids = chat(url, messages=TURNS, **fields)["prompt_token_ids"]
        return post(f"{url}/detokenize", {"tokens": ids})["prompt"]

    keeping = {"chat_template_kwargs": {"preserve_thinking": True}}
    assert "one more" not in prompt()
    assert "<think>one more</think>2" in prompt(reasoning_history="keep")
    assert prompt(reasoning_history="keep") == prompt(**keeping)
    assert prompt(reasoning_history="strip", **keeping) == prompt()
    error = chat(plain_url, 400, messages=TURNS, reasoning_history="keep")["error"]
    assert error["param"] == "reasoning_history"
    assert "drops the reasoning of messages.1" in error["message"]


def test_bad_words_are_missing_in_answers(url: str) -> None:
    (free,) = chat(url, enable_thinking=False)["choices"]
    first = free["token_ids"][0]
    word = post(f"{url}/detokenize", {"tokens": [first]})["prompt"]
    if not word.isascii():
        pytest.skip("half a character")
    (choice,) = chat(url, enable_thinking=False, bad_words=[word])["choices"]
    assert first not in choice["token_ids"]


def test_prompt_embeddings_and_processors_are_rejected(url: str) -> None:
    for name, value in (
        ("prompt_embeds", "AAAA"),
        ("logits_processors", ["a.b"]),
        ("custom_logit_processor", "a"),
    ):
        error = httpx.post(
            f"{url}/v1/completions", json={"prompt": "a", name: value}, timeout=60
        ).json()["error"]
        assert error["param"] == name
        assert name in error["message"]
        assert error["message"].count(".") == 1
