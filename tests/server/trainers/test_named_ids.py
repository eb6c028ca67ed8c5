"""Logprobs of named ids over HTTP, in the forms of vLLM, SGLang and OpenAI's clients."""

import base64
import io
import json
import struct
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.streams import post

PROMPT = [5, 6, 7, 8, 9]
IDS = [40, 3, 21]
GENERATE, SGLANG = "/inference/v1/generate", "/generate"


def vllm(url: str, status: int = 200, more: Any = None, **sampling: Any) -> Any:
    sampling = {"max_tokens": 4, "seed": 1, "ignore_eos": True, **sampling}
    body = {"token_ids": PROMPT, "sampling_params": sampling, **(more or {})}
    return post(f"{url}{GENERATE}", body, status)


def sglang(url: str, status: int = 200, **more: Any) -> Any:
    sampling = {"max_new_tokens": 4, "sampling_seed": 1, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, **more}
    return post(f"{url}{SGLANG}", body, status)


def whole_rows(url: str) -> list[dict[int, float]]:
    """Return the logprobs of the whole vocabulary at each completion token."""
    content = vllm(url, logprobs=-1)["choices"][0]["logprobs"]["content"]
    return [{top["token_id"]: top["logprob"] for top in row["top_logprobs"]} for row in content]


def test_named_ids_follow_the_token_in_vllms_form(rl_server: str) -> None:
    expected = whole_rows(rl_server)
    (choice,) = vllm(rl_server, logprob_token_ids=IDS)["choices"]
    for row, entry in zip(expected, choice["logprobs"]["content"], strict=True):
        sampled, *others = entry["top_logprobs"]
        assert (sampled["token_id"], sampled["logprob"]) == (entry["token_id"], entry["logprob"])
        ids = [each for each in IDS if each != sampled["token_id"]]
        assert [(each["token_id"], each["logprob"]) for each in others] == [
            (each, row[each]) for each in ids
        ]


def test_flat_forms_of_named_ids_agree(rl_server: str) -> None:
    expected = [[row[each] for each in IDS] for row in whole_rows(rl_server)]
    forms = {
        form: vllm(rl_server, logprob_token_ids=IDS, more={"flat_logprobs": form})["choices"][0]
        for form in ("list", "base64")
    }
    assert forms["list"]["token_id_logprobs"] == expected
    data = base64.b64decode(forms["base64"]["token_id_logprobs"])
    assert struct.unpack(f"<{len(data) // 4}f", data) == tuple(np.float32(expected).ravel())


@pytest.mark.parametrize(
    "rows", [IDS, [IDS[:2], IDS[1:]], [[40, -1, -1], [3, 21, 7]]], ids=["one", "each", "padded"]
)
def test_prompt_scores_are_vllms_npy_matrix(rl_server: str, rows: Any) -> None:
    reply = vllm(
        rl_server,
        max_tokens=1,
        prompt_logprob_token_ids=rows,
        prompt_logprob_start=2,
        temperature=0.7,
    )
    data = base64.b64decode(reply["prompt_token_id_logprobs"])
    scores = np.load(io.BytesIO(data))
    every = vllm(rl_server, max_tokens=1, prompt_logprobs=-1)["prompt_logprobs"]
    many = rows if isinstance(rows[0], list) else [rows, rows]
    assert scores.dtype == np.float32
    assert scores.shape == (2, len(many[0]))
    for index, ids in enumerate(many):
        for column, token_id in enumerate(ids):
            expected = (
                -np.inf if token_id < 0 else np.float32(every[3 + index][str(token_id)]["logprob"])
            )
            assert scores[index, column] == expected


def test_named_ids_are_sglangs_rows(rl_server: str) -> None:
    expected = whole_rows(rl_server)
    meta = sglang(rl_server, return_logprob=True, token_ids_logprob=IDS, logprob_start_len=1)
    meta = meta["meta_info"]
    assert meta["output_token_ids_logprobs"] == [
        [[row[each], each, None] for each in IDS] for row in expected
    ]
    first, *scored = meta["input_token_ids_logprobs"]
    every = vllm(rl_server, max_tokens=1, prompt_logprobs=-1)["prompt_logprobs"]
    assert first is None
    assert scored == [
        [[row[str(each)]["logprob"], each, None] for each in IDS] for row in every[2:]
    ]
    assert len(meta["input_token_logprobs"]) == 1 + len(scored)


def test_sglang_takes_a_list_of_ids_per_prompt(rl_server: str) -> None:
    body = {"input_ids": [PROMPT, PROMPT], "token_ids_logprob": [[3], [40, 21]]}
    first, second = sglang(rl_server, **body, return_logprob=True)
    ids = [
        [each[1] for each in reply["meta_info"]["output_token_ids_logprobs"][0]]
        for reply in (first, second)
    ]
    assert ids == [[3], [40, 21]]


def test_streams_of_named_ids_end_with_the_same_rows(rl_server: str) -> None:
    asked = {"return_logprob": True, "token_ids_logprob": IDS}
    whole = sglang(rl_server, **asked)["meta_info"]["output_token_ids_logprobs"]
    body = {"input_ids": PROMPT, "stream": True, **asked}
    body["sampling_params"] = {"max_new_tokens": 4, "sampling_seed": 1, "ignore_eos": True}
    reply = httpx.post(f"{rl_server}{SGLANG}", json=body, timeout=60)
    events = [json.loads(each[6:]) for each in reply.text.split("\n\n")[:-2]]
    streamed = [event["meta_info"]["output_token_ids_logprobs"] for event in events]
    assert all(rows == whole[: len(rows)] for rows in streamed)
    assert len(streamed[-1]) == 4


def test_named_ids_replace_the_top_logprobs_of_openai(rl_server: str) -> None:
    expected = whole_rows(rl_server)
    fields = {"max_tokens": 4, "seed": 1, "ignore_eos": True, "logprob_token_ids": IDS}
    body = {"prompt": PROMPT, "logprobs": 1, "return_tokens_as_token_ids": True, **fields}
    logprobs = post(f"{rl_server}/v1/completions", body)["choices"][0]["logprobs"]
    for row, tops in zip(expected, logprobs["top_logprobs"], strict=True):
        for token_id in IDS:
            assert tops[f"token_id:{token_id}"] == row[token_id]
    fields["return_tokens_as_token_ids"] = fields["logprobs"] = True
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    rows = post(f"{rl_server}/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    assert [[each["token"] for each in row["top_logprobs"]] for row in rows] == [
        [f"token_id:{each}" for each in IDS]
    ] * 4


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"logprob_token_ids": [3, 3]}, "holds 3 more than once"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [10**6]}, "outside the vocabulary"),
        ({"logprob_token_ids": list(range(10**5))}, "logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[3], [4]]}, "2 rows for 4 positions"),
        ({"prompt_logprob_token_ids": [3], "prompt_logprob_start": 4}, "leaves no position"),
        ({"prompt_logprob_token_ids": "a"}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[-1], [-1], [-1], [-1]]}, "has no ids"),
        ({"prompt_logprob_start": 2}, "prompt_logprob_token_ids"),
    ],
)
def test_bad_named_ids_are_rejected(rl_server: str, sampling: Any, message: str) -> None:
    assert message in vllm(rl_server, 400, **sampling)["error"]["message"]


def test_bad_named_ids_of_sglang_are_rejected(rl_server: str) -> None:
    for body, message in (
        ({"token_ids_logprob": IDS}, "requires return_logprob"),
        ({"token_ids_logprob": "a", "return_logprob": True}, "token_ids_logprob"),
        ({"token_ids_logprob": [[3], [4]], "return_logprob": True}, "2 entries for 1"),
        ({"token_ids_logprob": [True], "return_logprob": True}, "token_ids_logprob"),
    ):
        assert message in sglang(rl_server, 400, **body)["error"]["message"]
