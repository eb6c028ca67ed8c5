"""`/inference/v1/generate` and the trainers' parameters of `/v1/completions`: forms of logprobs,
texts, groups, versions.
"""

import base64
import json
import struct
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.text.tokenizer import load_tokenizer
from tests.depth import at_depth
from tests.server.trainers.asking import GENERATE, ask, look

PROMPT = [5, 6, 7]
SPECIAL, EOS = 1, 2
COMPLETIONS = "/v1/completions"


def streamed(url: str, path: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    reply = httpx.post(url + path, json=given | {"stream": True}, timeout=30)
    assert reply.status_code == 200, reply.text
    blocks = reply.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 8), "seed": st.integers(0, 99), "n": st.integers(1, 3)},
    optional={
        "temperature": st.sampled_from([0, 0.7, 3.0]),
        "top_k": st.sampled_from([-1, 0, 2]),
        "logprobs": st.integers(-1, 4),
        "raw_logprobs": st.just(True),
        "stop_token_ids": st.just(list(range(0, 300, 9))),
        "stop": st.just(["a"]),
        "skip_special_tokens": st.just(False),
        "routed_experts_prompt_start": st.integers(0, 3),
    },
)


@given(sampling=SAMPLING, text=st.booleans())
@settings(max_examples=at_depth(25), deadline=None)
def test_reply_holds_the_documented_fields(
    rl_server: str, sampling: dict[str, Any], text: bool
) -> None:
    fields = {
        "token_ids": PROMPT,
        "sampling_params": sampling,
        "output_mode": "text" if text else "tokens",
    }
    whole = ask(rl_server, GENERATE, fields)
    choices = whole["choices"]
    assert [choice["index"] for choice in choices] == list(range(sampling["n"]))
    for choice in choices:
        check_choice(choice, sampling, text)
    usage = whole["usage"]
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    # the flat form has the same numbers
    packed = ask(rl_server, GENERATE, fields | {"flat_logprobs": "base64"})["choices"]
    listed = ask(rl_server, GENERATE, fields | {"flat_logprobs": "list"})["choices"]
    for choice, one, other in zip(choices, packed, listed, strict=True):
        assert choice["token_ids"] == one["token_ids"] == other["token_ids"]
        count = len(one["token_ids"])
        numbers = struct.unpack(f"<{count}f", base64.b64decode(one["token_logprobs"]))
        assert list(numbers) == pytest.approx(other["token_logprobs"], abs=1e-6)
        assert one["logprobs"] is other["logprobs"] is None
        if choice["logprobs"] is not None:
            assert other["token_logprobs"] == [
                each["logprob"] for each in choice["logprobs"]["content"]
            ]
    # the stream agrees
    events = streamed(rl_server, GENERATE, fields | {"stream_options": {"include_usage": True}})
    for choice in choices:
        news = [
            each
            for event in events
            for each in event["choices"]
            if each["index"] == choice["index"]
        ]
        assert [token_id for each in news for token_id in each["token_ids"]] == choice["token_ids"]
        assert {
            key: news[-1][key]
            for key in ("finish_reason", "stop_reason", "weight_versions", "seed")
        } == {
            key: choice[key] for key in ("finish_reason", "stop_reason", "weight_versions", "seed")
        }
        if text:
            assert "".join(each["text"] for each in news) == choice["text"]
    assert {**events[-1]["usage"], "prompt_tokens_details": None} == {
        **usage,
        "prompt_tokens_details": None,
    }


def check_choice(choice: dict[str, Any], sampling: dict[str, Any], text: bool) -> None:
    ids, spans = choice["token_ids"], choice["weight_versions"]
    assert choice["finish_reason"] in ("stop", "length")
    assert (choice["stop_reason"] is None) == (
        choice["finish_reason"] == "length" or ids[-1] == EOS
    )
    assert [spans[0]["start"], *[span["end"] for span in spans]] == [
        0,
        *[b["start"] for _, b in pairwise(spans)],
        len(ids),
    ]
    assert choice["routed_experts"] is None
    if "logprobs" not in sampling:
        assert choice["logprobs"] is None
        return
    content, count = choice["logprobs"]["content"], sampling["logprobs"]
    assert [entry["token_id"] for entry in content] == ids
    for entry in content:
        tops = entry["top_logprobs"]
        if text:
            assert set(entry) == {"token", "token_id", "logprob", "bytes", "top_logprobs"}
            continue
        assert entry["token"] == f"token_id:{entry['token_id']}"
        assert 1 <= len(tops) <= (300 if count == -1 else max(count, 1))
        assert {key: tops[0][key] for key in ("token", "token_id", "logprob", "rank")} == {
            key: entry[key] for key in ("token", "token_id", "logprob", "rank")
        }  # the token itself comes first, as in vLLM
        assert [each["logprob"] for each in tops[1:]] == sorted(
            (each["logprob"] for each in tops[1:]), reverse=True
        )


@pytest.mark.thorough
def test_max_tokens_defaults_to_the_rest_of_the_context(rl_server: str) -> None:
    choice = ask(
        rl_server, GENERATE, {"token_ids": PROMPT, "sampling_params": {"ignore_eos": True}}
    )["choices"][0]
    assert len(choice["token_ids"]) == 512 - len(PROMPT)
    nothing = ask(rl_server, GENERATE, {"token_ids": [9] * 511})["choices"][0]
    assert len(nothing["token_ids"]) == 1


def test_mask_has_the_tokens_that_were_kept(rl_server: str) -> None:
    sampling = {"max_tokens": 5, "top_k": 3, "return_sampling_mask": True, "seed": 1}
    choice = ask(rl_server, GENERATE, {"token_ids": PROMPT, "sampling_params": sampling})[
        "choices"
    ][0]
    assert [len(row) for row in choice["sampling_mask"]] == [3] * len(choice["token_ids"])
    assert all(
        token_id in row
        for token_id, row in zip(choice["token_ids"], choice["sampling_mask"], strict=True)
    )


def test_salts_share_no_prefix(rl_server: str) -> None:
    prompt = list(range(100, 140))

    def cached(salt: str | None) -> int:
        fields = {"token_ids": prompt, "sampling_params": {"max_tokens": 1}, "cache_salt": salt}
        return ask(rl_server, GENERATE, fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(salt) > 0 for salt in (None, None, "7", "7", "8")] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_group_ends_when_enough_of_it_is_done(rl_server: str) -> None:
    sampling = {
        "n": 4,
        "max_tokens": 200,
        "temperature": 2.0,
        "seed": 2,
        "stop_token_ids": [*range(0, 300, 9)],
    }
    one = ask(
        rl_server, GENERATE, {"token_ids": PROMPT, "n_wanted": 2, "sampling_params": sampling}
    )["choices"]
    same = {"prompt": PROMPT, "return_token_ids": True, "n_wanted": 2} | sampling
    other = ask(rl_server, COMPLETIONS, same)["choices"]
    reasons = [choice["finish_reason"] for choice in one]
    assert sorted(reasons)[:2] == ["abort", "abort"]
    assert "abort" not in sorted(reasons)[2:]
    assert [choice["token_ids"] for choice in one] == [choice["token_ids"] for choice in other]
    assert all(choice["weight_versions"][-1]["end"] == len(choice["token_ids"]) for choice in one)
    ask(rl_server, GENERATE, {"token_ids": PROMPT, "n_wanted": 2}, 400)


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_request_may_wait_for_a_version(rl_server: str, path: str) -> None:
    now = int(look(rl_server, "/weight_info")["weight_version"])
    fields: dict[str, Any] = {
        "token_ids": PROMPT,
        "prompt": PROMPT,
        "sampling_params": {"max_tokens": 1},
        "max_tokens": 1,
    }
    assert ask(rl_server, path, fields | {"min_weight_version": now})["choices"]
    told: list[Any] = []
    later = fields | {"min_weight_version": str(now + 1), "request_id": "later"}
    thread = threading.Thread(
        target=lambda: told.append(ask(rl_server, path, later, **{"x-request-id": "later"}))
    )
    thread.start()
    deadline = time.monotonic() + 30
    while not ask(rl_server, "/abort_requests", {"request_ids": ["later"]})["aborted"]:
        assert thread.is_alive()
        assert time.monotonic() < deadline
    thread.join(30)
    assert told[0]["choices"][0]["finish_reason"] == "abort"
    ask(rl_server, path, fields | {"min_weight_version": [1]}, 400)


@pytest.mark.thorough
@given(
    seed=st.integers(0, 999),
    special=st.booleans(),
    shows_stop=st.booleans(),
    stop=st.sampled_from([None, ["a"], ["c", "dd"]]),
    min_tokens=st.integers(0, 6),
    chat=st.booleans(),
)
@settings(max_examples=at_depth(40), deadline=None)
def test_texts_show_what_is_asked_for(
    rl_server: str,
    tiny_folder: Path,
    seed: int,
    special: bool,
    shows_stop: bool,
    stop: list[str] | None,
    min_tokens: int,
    chat: bool,
) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    ids = [tokenizer.encode(letter)[0] for letter in "abcd"]
    body = {
        "max_tokens": 20,
        "seed": seed,
        "temperature": 2.0,
        "allowed_token_ids": [*ids, SPECIAL, EOS],
        "stop": stop,
    }
    body |= {"min_tokens": min_tokens}
    body |= {
        "skip_special_tokens": not special,
        "include_stop_str_in_output": shows_stop,
        "return_token_ids": True,
    }
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": PROMPT}
    path = "/v1/chat/completions" if chat else COMPLETIONS
    choice = ask(rl_server, path, body)["choices"][0]
    text = choice["message"]["content"] if chat else choice["text"]
    shown = choice["token_ids"]
    if choice["finish_reason"] == "stop" and shown[-1] == EOS and not shows_stop:
        shown = shown[:-1]
    expected = tokenizer.decode(shown, skip_special_tokens=not special)
    if isinstance(choice["stop_reason"], str) and not shows_stop:
        expected = expected.removesuffix(choice["stop_reason"])
    assert text == expected
    events = streamed(rl_server, path, body)
    news = [each for event in events for each in event["choices"]]
    assert (
        "".join(each["delta"].get("content", "") if chat else each["text"] for each in news) == text
    )


def test_batch_of_trls_goes_in_one_request(rl_server: str) -> None:
    prompts = [[3 + i, 4, 5] for i in range(32)]
    body = {
        "prompt": prompts,
        "n": 8,
        "max_tokens": 2,
        "logprobs": 0,
        "return_token_ids": True,
        "min_p": 0.0,
        "top_k": 0,
    }
    choices = ask(rl_server, COMPLETIONS, body | {"return_tokens_as_token_ids": True})["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [
        prompt for prompt in prompts for _ in range(8)
    ]
    assert [choice["index"] for choice in choices] == list(range(256))
    for choice in choices:
        assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]


def test_scored_token_is_first_in_its_row_and_has_a_rank(rl_server: str) -> None:
    body = {"prompt": [PROMPT * 3], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 5}
    rows = ask(rl_server, COMPLETIONS, body)["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    for token_id, row in zip((PROMPT * 3)[1:], rows[1:], strict=True):
        own, *others = row
        assert own == str(token_id)
        told = [row[each]["rank"] for each in others]
        assert told == [rank for rank in range(1, 6) if rank != row[own]["rank"]]
        assert 1 <= row[own]["rank"] <= 6  # 6: after the requested ones
    all_of_them = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "prompt_logprobs": -1}}
    assert [len(row or ()) for row in ask(rl_server, GENERATE, all_of_them)["prompt_logprobs"]] == [
        0,
        300,
        300,
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [300]}, "300"),
        ({"features": {"mm_hashes": {}}}, "features"),
        (
            {"sampling_params": {"structured_outputs": {"regex": "("}}},
            "sampling_params.structured_outputs.regex",
        ),
        ({"sampling_params": {"logprobs": 301}}, "sampling_params.logprobs"),
        ({"sampling_params": {"n": 5000}}, "sampling_params.n"),
        ({"sampling_params": {"max_tokens": 511}}, "max_tokens"),
        ({"sampling_params": {"skip_reading_prefix_cache": True}}, "skip_reading_prefix_cache"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"output_mode": "words"}, "output_mode"),
        ({"flat_logprobs": "hex"}, "flat_logprobs"),
        ({"model": "other"}, "other"),
    ],
)
def test_vllm_generate_rejects_invalid_bodies(
    rl_server: str, change: dict[str, Any], named: str
) -> None:
    status = 404 if "model" in change else 400
    reply = ask(rl_server, GENERATE, {"token_ids": PROMPT} | change, status)
    assert named in reply["message"]
    assert reply["success"] is False
