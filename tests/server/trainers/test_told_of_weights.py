"""Reports on weights and requests in the forms of SGLang and vLLM: rows by name, folder, checksums,
ids.
"""

import threading
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.models.tiny import llama_config, llama_weights
from tests.server.trainers.asking import ask, body, look, running
from tests.standing import dawdling

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
CHECKER = {
    "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1,
}  # fmt: skip


def test_weights_by_name(rl_server: str, tmp_path: Path) -> None:
    new = llama_weights(llama_config(), 5)
    save_file(new, tmp_path / "model.safetensors")
    ask(rl_server, "/update_weights_from_disk", {"model_path": str(tmp_path)})
    for name in (NORM, EMBEDDING):
        reply = ask(rl_server, "/get_weights_by_name", {"name": name})
        assert reply == new[name][:100].to(torch.float32).tolist()
        assert (
            ask(rl_server, "/get_weights_by_name", {"name": name, "truncate_size": 2}) == reply[:2]
        )
        assert look(rl_server, f"/get_weights_by_name?name={name}&truncate_size=1") == reply[:1]
    assert (
        "'x' is not a tensor"
        in ask(rl_server, "/get_weights_by_name", {"name": "x"}, 400)["message"]
    )
    ask(rl_server, "/get_weights_by_name", {"name": NORM, "truncate_size": 0}, 400)


def test_rows_are_bounded(rl_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_inference.remote.engine_weights.MOST_NUMBERS", 640)
    assert (
        len(ask(rl_server, "/get_weights_by_name", {"name": EMBEDDING, "truncate_size": 10})) == 10
    )
    reply = ask(rl_server, "/get_weights_by_name", {"name": EMBEDDING, "truncate_size": 11}, 400)[
        "message"
    ]
    assert reply == f"11 rows of '{EMBEDDING}' hold 704 numbers; request 10 rows."


def test_folder_that_serves(rl_server: str, tmp_path: Path) -> None:
    save_file(llama_weights(llama_config(), 6), tmp_path / "model.safetensors")
    before = look(rl_server, "/get_model_info")["model_path"]
    ask(rl_server, "/update_weights_from_disk", {"model_path": str(tmp_path / "nobody")}, 400)
    ask(rl_server, "/begin_weight_update", {})
    ask(rl_server, "/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert look(rl_server, "/get_model_info")["model_path"] == before, "it is not served yet"
    ask(rl_server, "/end_weight_update", {})
    for path in ("/get_model_info", "/model_info", "/server_info", "/get_server_info"):
        assert look(rl_server, path)["model_path"] == str(tmp_path)
    info = look(rl_server, "/server_info")
    assert info["max_total_num_tokens"] == info["kv_cache_tokens"] > 0


def test_checksums_are_in_sglangs_form(rl_server: str) -> None:
    (rank,) = ask(rl_server, "/weights_checker", {})["ranks"]
    assert rank["parallelism_info"] == CHECKER
    whole = ask(rl_server, "/weight_checker", {"action": "checksum"})["checksums"]
    assert rank["checksums"] == {name: digest[:16] for name, digest in whole.items()}


def test_rid_that_is_alive_is_refused(rl_server: str) -> None:
    fields = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
        "rid": "mine",
    }
    first = threading.Thread(target=lambda: ask(rl_server, "/generate", fields))
    with dawdling():
        first.start()
        for _ in range(2000):
            if look(rl_server, "/v1/loads")["loads"][0]["num_total_reqs"]:
                break
        short = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        reply = ask(rl_server, "/generate", short | {"rid": "mine"}, 400)
        assert (
            reply["message"]
            == 'rid "mine" is in use by an unfinished request; give each request its own.'
        )
        ask(rl_server, "/generate", short | {"rid": "another"})
        assert ask(rl_server, "/abort_request", {"rid": "mine"})["num_aborted"] == 1
    first.join(20)
    ask(rl_server, "/generate", short | {"rid": "mine"})
    twice = {"input_ids": [[1], [2]], "sampling_params": {"max_new_tokens": 1}, "rid": ["a", "a"]}
    ask(rl_server, "/generate", twice, 400)
    assert look(rl_server, "/v1/loads")["loads"][0]["num_total_reqs"] == 0
    ask(rl_server, "/generate", twice | {"rid": ["a", "b"]})


def test_requests_are_aborted_where_they_are_generated(rl_server: str) -> None:
    path = "/inference/v1/abort_requests"
    assert "request_ids is missing" in ask(rl_server, path, {}, 400)["message"]
    with running(rl_server, body([1, 2, 3], 430) | {"request_id": "one"}) as it:
        assert ask(rl_server, path, {"request_ids": []})["aborted"] == 0
        assert ask(rl_server, path, {"request_ids": ["generate-tokens-one"]})["aborted"] == 1
        assert it.end()["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "given", "prefix"),
    [
        ("/v1/completions", {"prompt": [1, 2]}, "cmpl-"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "chatcmpl-"),
    ],
)
def test_bodys_request_id_names_the_request(
    rl_server: str, path: str, given: dict[str, object], prefix: str
) -> None:
    asked = given | {"model": "tiny", "request_id": "mine", "max_tokens": 400, "ignore_eos": True}
    replies: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: replies.append(httpx.post(rl_server + path, json=asked, timeout=60))
    )
    with dawdling():
        thread.start()
        for _ in range(2000):
            if look(rl_server, "/v1/loads")["loads"][0]["num_total_reqs"]:
                break
        assert ask(rl_server, "/abort_requests", {"request_ids": [f"{prefix}mine"]})["aborted"] == 1
    thread.join(20)
    assert replies[0].json()["id"] == f"{prefix}mine"
