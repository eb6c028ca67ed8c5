"""`/generate`: requests of SGLang's clients and the fields they read."""

import base64
import json
import struct
import threading
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.depth import at_depth
from tests.server.streams import post
from tests.standing import dawdling

VARYING = {"id", "e2e_latency", "cached_tokens"}
# As slime sends it at top_p < 1.
SLIME = {
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": -1,
    "max_new_tokens": 8,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
    "custom_params": {"return_top_p_token_ids": True},
}


def generate(
    url: str, prompt: list[Any], sampling: Any = None, status: int = 200, **more: Any
) -> Any:
    return post(
        f"{url}/generate", {"input_ids": prompt, "sampling_params": sampling or {}, **more}, status
    )


def events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = httpx.post(f"{url}/generate", json=body | {"stream": True}, timeout=60)
    assert reply.status_code == 200, reply.text
    *blocks, last, rest = reply.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def core(told: dict[str, Any]) -> dict[str, Any]:
    meta = {name: value for name, value in told["meta_info"].items() if name not in VARYING}
    return {name: value for name, value in told.items() if name != "index"} | {"meta_info": meta}


def test_sglang_generate_matches_the_other_routes(rl_server: str) -> None:
    reply = generate(
        rl_server,
        [5, 6, 7],
        {"max_new_tokens": 6, "sampling_seed": 3},
        return_logprob=True,
        rid="mine",
    )
    other = post(
        f"{rl_server}/v1/completions",
        {"prompt": [5, 6, 7], "max_tokens": 6, "seed": 3, "logprobs": 0, "return_token_ids": True},
    )["choices"][0]
    meta = reply["meta_info"]
    assert (reply["output_ids"], reply["text"]) == (other["token_ids"], other["text"])
    assert [row[0] for row in meta["output_token_logprobs"]] == other["logprobs"]["token_logprobs"]
    assert [row[1:] for row in meta["output_token_logprobs"]] == [
        [each, None] for each in reply["output_ids"]
    ]
    assert (meta["id"], meta["seed"], meta["weight_version"]) == ("mine", 3, "0")
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["input_token_logprobs"]) == (
        3,
        6,
        [],
    )


SAMPLINGS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(0, 12), "sampling_seed": st.integers(0, 99)},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "top_k": st.sampled_from([-1, 5]),
        "n": st.integers(1, 3),
        "stop_token_ids": st.just(list(range(3, 60))),
        "stop": st.sampled_from([["e"], ["a", "b"]]),
        "no_stop_trim": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "presence_penalty": st.just(0.5),
    },
)


@pytest.mark.thorough
@settings(
    max_examples=at_depth(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sampling=SAMPLINGS,
    prompts=st.lists(st.lists(st.integers(3, 299), min_size=1, max_size=5), min_size=1, max_size=2),
    top=st.integers(0, 2),
    scored=st.sampled_from([-1, 0]),
)
def test_stream_grows_into_the_whole_answer(
    rl_server: str, sampling: dict[str, Any], prompts: list[list[int]], top: int, scored: int
) -> None:
    many = len(prompts) > 1
    body = {
        "input_ids": prompts if many else prompts[0],
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": top,
        "logprob_start_len": scored,
        "return_prompt_token_ids": True,
    }
    whole = post(f"{rl_server}/generate", body)
    assert isinstance(whole, list) == (many or sampling.get("n", 1) > 1)
    wholes = whole if isinstance(whole, list) else [whole]
    last: dict[int, dict[str, Any]] = {}
    for event in events(rl_server, body):
        assert ("index" in event) == isinstance(whole, list)
        before = last.get(event.get("index", 0))
        if before is not None:
            _assert_grows(before, event)
        last[event.get("index", 0)] = event
    assert [core(last[place]) for place in range(len(wholes))] == [core(each) for each in wholes]


def _assert_grows(before: dict[str, Any], event: dict[str, Any]) -> None:
    assert before["meta_info"]["finish_reason"] is None
    count = before["meta_info"]["completion_tokens"]
    assert event["output_ids"][:count] == before["output_ids"]
    assert event["text"].startswith(before["text"])
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert event["meta_info"].get(name, [])[:count] == before["meta_info"].get(name, [])


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.2}])
def test_logprobs_are_of_the_whole_vocabulary(rl_server: str, filters: dict[str, Any]) -> None:
    """Return unfiltered logprobs, as trainers do. The mask gives the filtered distribution."""
    sampling = {"max_new_tokens": 12, "sampling_seed": 1, **filters}
    mask = {"return_sampling_mask": True} if filters else {}
    reply = generate(
        rl_server, [5, 6, 7], sampling, return_logprob=True, top_logprobs_num=2, **mask
    )
    rows = reply["meta_info"]["output_token_logprobs"]
    scored = generate(  # as Miles rescores a sample
        rl_server,
        [5, 6, 7, *reply["output_ids"]],
        {"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        logprob_start_len=2,
    )
    inputs = scored["meta_info"]["input_token_logprobs"]
    assert inputs[0] == [None, 7, None]
    assert [row[1] for row in inputs[1:]] == reply["output_ids"]
    assert [row[0] for row in inputs[1:]] == pytest.approx([row[0] for row in rows], abs=1e-4)
    assert scored["output_ids"] == scored["meta_info"]["output_token_logprobs"] == []
    assert scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    for (logprob, token_id, _), tops in zip(
        rows, reply["meta_info"]["output_top_logprobs"], strict=True
    ):
        assert tops[0][0] >= logprob - 1e-6
        assert all(top[0] == pytest.approx(logprob) for top in tops if top[1] == token_id)
    if filters:
        kept = reply["meta_info"]["output_token_sampling_mask"]
        sampled = reply["meta_info"]["output_token_sampling_logprobs"]
        assert all(token_id in ids for token_id, ids in zip(reply["output_ids"], kept, strict=True))
        assert all(own >= row[0] for own, row in zip(sampled, rows, strict=True))
        assert any(own > row[0] + 0.01 for own, row in zip(sampled, rows, strict=True))


def test_masks_of_slime(rl_server: str) -> None:
    meta = generate(rl_server, [5, 6, 7], SLIME, return_logprob=True, return_sampling_mask=True)[
        "meta_info"
    ]
    ids, offsets = (_int32(meta[name]) for name in ("top_p_token_ids", "top_p_token_offsets"))
    rows = [ids[begin:end] for begin, end in pairwise(offsets)]
    assert rows == meta["output_token_sampling_mask"]
    assert len(rows) == meta["completion_tokens"] == meta["output_token_sampling_mask_length"]


def _int32(text: str) -> list[int]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def test_logprobs_as_flat_numbers(rl_server: str) -> None:
    sampling = {"max_new_tokens": 5, "sampling_seed": 4}
    rows = generate(rl_server, [5, 6], sampling, return_logprob=True)["meta_info"][
        "output_token_logprobs"
    ]
    listed = generate(rl_server, [5, 6], sampling, return_logprob=True, flat_logprobs="list")[
        "meta_info"
    ]
    packed = generate(rl_server, [5, 6], sampling, return_logprob=True, flat_logprobs="base64")[
        "meta_info"
    ]
    assert listed["token_logprobs"] == [row[0] for row in rows]
    assert struct.unpack("<5f", base64.b64decode(packed["token_logprobs"])) == pytest.approx(
        listed["token_logprobs"]
    )
    assert "output_token_logprobs" not in listed | packed


def test_stop_reason_is_reported_and_shown_on_request(rl_server: str) -> None:
    free = generate(
        rl_server,
        [5, 6, 7],
        {"max_new_tokens": 12, "sampling_seed": 8, "skip_special_tokens": False},
    )
    ids = free["output_ids"]
    place = next(
        place for place in range(3, 12) if ids[place] >= 3 and ids[place] not in ids[:place]
    )
    sampling = {"max_new_tokens": 12, "sampling_seed": 8, "stop_token_ids": [ids[place]]}
    cut = generate(rl_server, [5, 6, 7], sampling)
    shown = generate(rl_server, [5, 6, 7], sampling | {"no_stop_trim": True})
    assert cut["output_ids"] == shown["output_ids"] == ids[: place + 1]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[place]}
    tokens = {"add_special_tokens": False}
    assert [cut["text"], shown["text"]] == [
        post(f"{rl_server}/detokenize", {"tokens": each, **tokens})["prompt"]
        for each in (ids[:place], ids[: place + 1])
    ]


def test_batch_takes_parameters_per_prompt(rl_server: str) -> None:
    reply = generate(
        rl_server,
        [[5, 6, 7], [8, 9]],
        [{"max_new_tokens": 2}, {"max_new_tokens": 3}],
        return_logprob=[True, False],
        logprob_start_len=[1, -1],
        rid=["a", "b"],
    )
    assert [each["meta_info"]["id"] for each in reply] == ["a", "b"]
    assert [each["meta_info"]["completion_tokens"] for each in reply] == [2, 3]
    assert [row[1] for row in reply[0]["meta_info"]["input_token_logprobs"]] == [6, 7]
    assert "output_token_logprobs" not in reply[1]["meta_info"]
    texts = post(
        f"{rl_server}/generate", {"text": ["hi", "you"], "sampling_params": {"max_new_tokens": 1}}
    )
    assert [each["meta_info"]["prompt_tokens"] for each in texts] == [2, 3]


def test_max_new_tokens_defaults_to_the_rest_of_the_context(rl_server: str) -> None:
    reply = generate(rl_server, [5] * 500, {"ignore_eos": True})
    assert reply["meta_info"]["completion_tokens"] == 12


@pytest.mark.thorough
def test_aborted_sample_keeps_its_tokens_and_can_continue(rl_server: str) -> None:
    sampling = {"max_new_tokens": 400, "sampling_seed": 5, "ignore_eos": True}
    whole = generate(rl_server, [5, 6, 7], sampling)["output_ids"]
    answers: list[Any] = []
    asked = threading.Thread(
        target=lambda: answers.append(
            generate(rl_server, [5, 6, 7], sampling, return_logprob=True, rid="mine")
        )
    )
    with dawdling():
        asked.start()
        until = time.monotonic() + 30
        while not httpx.get(f"{rl_server}/v1/loads?include=core").json()["loads"][0][
            "num_running_reqs"
        ]:
            assert time.monotonic() < until
        assert post(f"{rl_server}/abort_request", {"rid": "another"})["num_aborted"] == 0
        post(f"{rl_server}/abort_request", {"rid": "mine"})
    asked.join(30)
    meta, ids = answers[0]["meta_info"], answers[0]["output_ids"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < len(ids) < 400
    assert len(meta["output_token_logprobs"]) == len(ids) == meta["weight_versions"][-1]["end"]
    rest = generate(rl_server, [5, 6, 7, *ids], sampling | {"max_new_tokens": 400 - len(ids)})
    assert ids + rest["output_ids"] == whole


def test_first_of_a_group_are_enough(rl_server: str) -> None:
    sampling = {
        "n": 4,
        "max_new_tokens": 400,
        "sampling_seed": 1,
        "stop_token_ids": list(range(3, 12)),
    }
    reply = generate(rl_server, [5, 6, 7], sampling, n_wanted=2)
    ends = sorted(each["meta_info"]["finish_reason"]["type"] for each in reply)
    assert ends[:2] == ["abort", "abort"]
    assert "abort" not in ends[2:]
    assert {each["meta_info"]["finish_reason"].get("message") for each in reply} >= {
        "group complete"
    }


def test_sample_reports_one_version_of_the_weights(rl_server: str) -> None:
    sampling = {"max_new_tokens": 1}
    for wanted in ({"exact_version": 0}, {"min_version": "0"}, {"exact_version": None}):
        assert (
            generate(rl_server, [5], sampling, weight_version=wanted)["meta_info"]["weight_version"]
            == "0"
        )
    assert (
        'weight version "mine" does not exist'
        in generate(rl_server, [5], 0, 409, weight_version={"exact_version": "mine"})["message"]
    )


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [5]}, "either text or input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[5], "a"]}, "input_ids must be"),
        ({"text": ["a", 5]}, "text must be"),
        ({"input_ids": [5, 300]}, "token ids are in [0, 300)"),
        ({"input_ids": [5] * 512}, "context"),
        (
            {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 511}},
            "lower max_new_tokens to 510",
        ),
        (
            {"input_ids": [5], "sampling_params": {"max_new_tokens": "3"}},
            "sampling_params.max_new_tokens must be",
        ),
        (
            {"input_ids": [5], "sampling_params": {"regex": "("}},
            "sampling_params.regex: the regex grammar cannot be enforced",
        ),
        ({"input_ids": [5], "sampling_params": {"n": 99999}}, "at most"),
        (
            {"input_ids": [[5], [6]], "sampling_params": [{"n": 2}, {}]},
            "sampling_params.n must be the same",
        ),
        (
            {"input_ids": [[5], [6]], "sampling_params": [{}] * 3},
            "sampling_params has 3 entries for 2",
        ),
        (
            {"input_ids": [[5], [6]], "return_logprob": [True, True, False]},
            "return_logprob has 3 entries",
        ),
        (
            {"input_ids": [5], "return_logprob": True, "logprob_start_len": 1},
            "logprob_start_len=1 must be below",
        ),
        ({"input_ids": [5], "return_sampling_mask": True}, "sampling_mask needs"),
        (
            {"input_ids": [5], "weight_version": {"exact_version": 1.5}},
            "weight_version.exact_version must be",
        ),
        ({"input_ids": [5], "n_wanted": 2}, "num_wanted"),
        ({"input_ids": [5], "return_routed_experts": True}, "keeps no record of routed experts"),
        *(
            ({"input_ids": [5], name: value}, f"{name} is not supported")
            for name, value in {
                "image_data": ["a.png"],
                "return_hidden_states": True,
                "custom_logit_processor": "a",
                "session_params": {"id": "a"},
            }.items()
        ),
    ],
)
def test_unsupported_field_is_rejected_by_name(
    rl_server: str, body: dict[str, Any], told: str
) -> None:
    reply = post(f"{rl_server}/generate", body, 400)
    assert reply["success"] is False
    assert told in reply["message"] == reply["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(rl_server: str) -> None:
    """Accept fields without effect that AReaL and other trainers send."""
    nothing = {
        "image_data": None,
        "lora_path": None,
        "return_routed_experts": False,
        "token_ids_logprob": None,
    }
    hints = {
        "session_id": "a",
        "routed_dp_rank": 0,
        "log_metrics": True,
        "stream": False,
        "priority": 3,
    }
    sampling = {
        "max_new_tokens": 1,
        "json_schema": None,
        "regex": "",
        "frequency_penalty": 0.0,
        "stop_token_ids": [2],
    }
    assert (
        generate(rl_server, [5], sampling, **nothing, **hints)["meta_info"]["completion_tokens"]
        == 1
    )
