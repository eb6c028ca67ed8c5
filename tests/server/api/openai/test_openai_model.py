"""OpenAI's routes on a real model: streams agree with whole answers, and lm-eval can read prompt
scores.
"""

import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.checkpoints.loading import resolve_model
from nano_inference.rl.checkpoint import checkpoint_of
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from tests.depth import at_depth
from tests.server.streams import events, post

TEXT = "The capital of France is Paris. 🙂 Über"
CONTEXT, CONTINUATION = "The capital of France is", " Paris."


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@cache
def scores(text: str) -> list[float]:
    """Compute the logprobs of all tokens after the first with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoint_of("smollm2-135m", Path(folder))
        model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    ids = torch.tensor([tokenizer().encode(text)])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()


def lined_up(choice: dict[str, Any]) -> list[tuple[Any, ...]]:
    logprobs = choice["logprobs"]
    columns = [
        logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    ]
    assert len({len(column) for column in columns}) == 1
    return list(zip(*columns, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("as_ids", [False, True])
def test_loglikelihood_as_lm_eval_reads_it(server: str, as_ids: bool) -> None:
    text = CONTEXT + CONTINUATION
    ids, num_context = tokenizer().encode(text), len(tokenizer().encode(CONTEXT))
    body = {
        "prompt": [ids if as_ids else text],
        "echo": True,
        "max_tokens": 1,
        "logprobs": 1,
        "temperature": 0,
    }
    choice = post(f"{server}/v1/completions", body | {"seed": 1234})["choices"][0]
    logprobs = choice["logprobs"]
    mine = logprobs["token_logprobs"][num_context:-1]
    # bfloat16 against float32
    assert mine == pytest.approx(scores(text)[num_context - 1 :], abs=0.1)
    # lm-eval's `is_greedy`: every token is the most probable one at its position
    tops = logprobs["top_logprobs"][num_context:-1]
    tokens = logprobs["tokens"][num_context:-1]
    assert tokens == [" Paris", "."]
    assert all(max(top, key=top.get) == token for token, top in zip(tokens, tops, strict=True))


def test_echo_lines_up_with_its_text(server: str) -> None:
    body = {
        "prompt": TEXT,
        "echo": True,
        "max_tokens": 3,
        "logprobs": 2,
        "temperature": 0,
        "ignore_eos": True,
    }
    choice = post(f"{server}/v1/completions", body)["choices"][0]
    assert choice["text"].startswith(TEXT)
    rows = lined_up(choice)
    assert len(rows) == len(tokenizer().encode(TEXT)) + 3
    assert rows[0][1:] == (None, None, 0)
    for (token, logprob, top, offset), (*_, end) in pairwise(rows[1:]):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:end] == token
        assert top[token] == logprob
        assert len(top) in (2, 3)
    whole = post(f"{server}/v1/completions", body | {"max_tokens": 0})["choices"][0]
    assert whole["text"] == TEXT
    assert lined_up(whole) == rows[:-3]
    (streamed,) = [event["choices"][0] for event in events(f"{server}/v1/completions", body)]
    assert (streamed["text"], lined_up(streamed)) == (choice["text"], rows)


@pytest.mark.thorough
def test_scored_prompts_of_both_routes(server: str) -> None:
    body = {"prompt": CONTEXT, "max_tokens": 0, "prompt_logprobs": 2}
    reply = post(f"{server}/v1/completions", body)
    assert (reply["choices"][0]["text"], reply["usage"]["completion_tokens"]) == ("", 0)
    rows = reply["choices"][0]["prompt_logprobs"]
    ids = tokenizer().encode(CONTEXT)
    assert rows[0] is None
    mine = [row[str(token_id)]["logprob"] for row, token_id in zip(rows[1:], ids[1:], strict=True)]
    assert mine == pytest.approx(scores(CONTEXT), abs=0.1)
    # the token itself, then the most probable others
    for row, token_id in zip(rows[1:], ids[1:], strict=True):
        own, *others = row
        assert own == str(token_id)
        assert [row[each]["rank"] for each in others] == [
            rank for rank in (1, 2) if rank != row[own]["rank"]
        ]
        assert (
            row[own]["decoded_token"] == tokenizer().decode([token_id])
            or "\\x" in row[own]["decoded_token"]
        )
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "prompt_logprobs": True,
    }
    reply = post(f"{server}/v1/chat/completions", chat | {"return_token_ids": True})
    assert len(reply["prompt_logprobs"]) == len(reply["prompt_token_ids"])
    streamed = events(f"{server}/v1/chat/completions", chat)
    assert [event["prompt_logprobs"] for event in streamed if event.get("prompt_logprobs")] == [
        reply["prompt_logprobs"]
    ]


def joined(chunks: list[dict[str, Any]], num_choices: int) -> list[dict[str, Any]]:
    """Join the deltas of each choice of a stream."""
    choices: list[dict[str, Any]] = [
        {"text": "", "token_ids": [], "logprobs": {}, "raw_logprobs": []}
        for _ in range(num_choices)
    ]
    for chunk in chunks:
        for news in chunk["choices"]:
            choice = choices[news["index"]]
            choice["text"] += news["delta"].get("content", "") if "delta" in news else news["text"]
            choice["token_ids"] += news.get("token_ids") or []
            choice["raw_logprobs"] += news.get("raw_logprobs", [])
            for name, column in (news["logprobs"] or {}).items():
                choice["logprobs"][name] = choice["logprobs"].get(name, []) + (column or [])
            choice |= {
                key: news[key] for key in ("finish_reason", "stop_reason", "seed") if key in news
            }
    return choices


@pytest.mark.thorough
@settings(max_examples=at_depth(15), deadline=None)
@given(data=st.data())
def test_stream_says_what_a_whole_answer_says(server: str, data: st.DataObject) -> None:
    chat = data.draw(st.booleans())
    body: dict[str, Any] = {
        "max_tokens": data.draw(st.integers(1, 24)),
        "seed": data.draw(st.integers(0, 99)),
        "temperature": data.draw(st.sampled_from([0, 0.7, 2.0])),
        "n": data.draw(st.integers(1, 2)),
        "stop": data.draw(st.sampled_from([None, [" the"], ["e", "."]])),
        "ignore_eos": data.draw(st.booleans()),
        "stop_token_ids": data.draw(st.sampled_from([[], [28, 30], [253]])),
        "raw_logprobs": True,
        "return_token_ids": True,
    }
    if chat:
        path = "chat/completions"
        body |= {
            "messages": [{"role": "user", "content": "Name some birds."}],
            "logprobs": True,
            "top_logprobs": 1,
        }
    else:
        path = "completions"
        body |= {
            "prompt": data.draw(st.sampled_from([["Once upon"], ["A 🙂", [28, 28]]])),
            "logprobs": 1,
        }
    whole = post(f"{server}/v1/{path}", body)
    options = {"stream_options": {"include_usage": True}}
    chunks = events(f"{server}/v1/{path}", body | options)
    choices = joined(chunks, len(whole["choices"]))
    for choice, other in zip(choices, whole["choices"], strict=True):
        assert choice["text"] == (other["message"]["content"] if chat else other["text"])
        for key in ("token_ids", "raw_logprobs", "finish_reason", "stop_reason", "seed"):
            assert choice[key] == other[key], key
        assert {k: v or None for k, v in choice["logprobs"].items()} == other["logprobs"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == whole["usage"][name]


@pytest.mark.thorough
def test_cached_tokens_are_counted(server: str) -> None:
    body = {
        "prompt": "Count to ten: one, two, three, four, five, six, seven. " * 4,
        "max_tokens": 2,
    }
    first = post(f"{server}/v1/completions", body | {"cache_salt": "mine"})["usage"]
    again = post(f"{server}/v1/completions", body | {"cache_salt": "mine", "n": 3})["usage"]
    streamed = events(
        f"{server}/v1/completions",
        body | {"cache_salt": "mine", "stream_options": {"include_usage": True}},
    )
    other = post(f"{server}/v1/completions", body | {"cache_salt": "other"})["usage"]
    cached = [
        usage["prompt_tokens_details"]["cached_tokens"]
        for usage in (first, again, streamed[-1]["usage"], other)
    ]
    assert cached[0] == cached[3] == 0
    assert cached[1] == cached[2] > 32
    assert again["prompt_tokens"] == first["prompt_tokens"]
