"""vLLM's RL routes and their effect on requests: pause, abort, sleep, recompute."""

import base64
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.trainers.asking import GENERATE, ask, body, look, running

PROMPT = list(range(3, 60))
LONG = 430  # tokens: more than a request gets during a check
ADDRESS = {"master_address": "127.0.0.1", "master_port": 1}
PLACE = {"rank_offset": 1, "world_size": 2}
ID = base64.b64encode(bytes(128)).decode()  # of NCCL
QUIET = 0.2  # seconds without progress of a paused engine


@pytest.fixture
def url(rl_server: str) -> Iterator[str]:
    """Yield a server and restore its state at the end."""
    yield rl_server
    ask(rl_server, "/wake_up")
    ask(rl_server, "/resume")
    assert look(rl_server, "/is_paused") == {"is_paused": False}


def sampled(url: str, given: dict[str, Any]) -> dict[str, Any]:
    (choice,) = ask(url, GENERATE, given)["choices"]
    return choice


def computed(url: str) -> int:
    """Return the number of tokens computed so far."""
    return look(url, "/stats")["engine"]["tokens_computed"]


def cached(url: str) -> int:
    """Return the number of the prompt's tokens in the prefix cache."""
    usage = ask(url, GENERATE, body(PROMPT, 1))["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.thorough
@pytest.mark.parametrize("clear_cache", ["true", "false"])
def test_pause_stops_requests_where_they_are(url: str, clear_cache: str) -> None:
    alone = sampled(url, body([7, 8, 9], LONG))
    with running(url, body([7, 8, 9], LONG)) as it:
        assert ask(url, f"/pause?mode=keep&clear_cache={clear_cache}") == {"status": "paused"}
        assert look(url, "/is_paused") == {"is_paused": True}
        assert look(url, "/is_sleeping") == {"is_sleeping": True}
        before = computed(url)  # tokens in transit may still arrive
        time.sleep(QUIET)
        assert computed(url) == before
        assert len(it.token_ids) < LONG
        assert ask(url, "/resume") == {"status": "resumed"}
        assert it.end()["finish_reason"] == "length"
        assert it.token_ids == alone["token_ids"]


def test_new_requests_wait_for_the_end_of_a_pause(url: str) -> None:
    alone = sampled(url, body([7], 3))
    ask(url, "/pause", {"mode": "keep"})
    told: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: told.append(sampled(url, body([7], 3))))
    thread.start()
    thread.join(QUIET)
    assert thread.is_alive()
    ask(url, "/resume", {})
    thread.join(10)
    assert told == [alone]


@pytest.mark.thorough
def test_pause_that_aborts_answers_with_what_there_is(url: str) -> None:
    alone = sampled(url, body([7, 8, 9], LONG))
    with running(url, body([7, 8, 9], LONG)) as it:
        ask(url, "/pause")  # vLLM's default
        last = it.end()
        count = len(it.token_ids)
        assert (last["finish_reason"], last["weight_versions"]) == (
            "abort",
            [{"version": "0", "start": 0, "end": count}],
        )
        assert 2 <= count < LONG
        assert it.token_ids == alone["token_ids"][:count]
        assert it.logprobs == [each["logprob"] for each in alone["logprobs"]["content"][:count]]


def test_pause_that_waits_lets_requests_end(url: str) -> None:
    with running(url, body([7, 8, 9], 100)) as it:
        ask(url, "/pause?mode=wait")
        assert it.end()["finish_reason"] == "length"
        assert len(it.token_ids) == 100
    assert look(url, "/is_paused") == {"is_paused": True}


def test_prefix_cache_is_reset_on_request(url: str) -> None:
    ask(url, GENERATE, body(PROMPT, 1))
    assert cached(url) > 40
    for path in (
        "/reset_prefix_cache",
        "/reset_prefix_cache?reset_external=true",
        "/pause",
        "/pause?clear_cache=true",
    ):
        ask(url, path)
        ask(url, "/resume")
        assert cached(url) == 0, path
        assert cached(url) > 40
    ask(url, "/pause?clear_cache=false")
    ask(url, "/resume")
    assert cached(url) > 40


@pytest.mark.parametrize(
    "named", ["by the body", "by the header", "by the reply's id", "under /inference"]
)
def test_requests_are_aborted_by_their_ids(url: str, named: str) -> None:
    path = "/inference/v1/abort_requests" if named == "under /inference" else "/abort_requests"
    given = body([7, 8, 9], LONG) | ({"request_id": "mine"} if named == "by the body" else {})
    with running(
        url, given, **{"x-request-id": "other" if named == "by the body" else "mine"}
    ) as it:
        assert ask(url, path, {"request_ids": ["nobody's"]}) == {"status": "aborted", "aborted": 0}
        name = "generate-tokens-mine" if named == "by the reply's id" else "mine"
        assert ask(url, path, {"request_ids": [name]}) == {"status": "aborted", "aborted": 1}
        assert it.end()["finish_reason"] == "abort"
        assert 2 <= len(it.token_ids) < LONG


def test_abort_without_ids_ends_all_requests(url: str) -> None:
    with running(url, body([7], LONG)) as one, running(url, body([8], LONG)) as other:
        assert ask(url, "/abort_requests")["aborted"] == 2
        assert [it.end()["finish_reason"] for it in (one, other)] == ["abort", "abort"]


@pytest.mark.thorough
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_keeps_requests_and_their_bits(url: str, level: int) -> None:
    alone = sampled(url, body([7, 8, 9], LONG))
    with running(url, body([7, 8, 9], LONG)) as it:
        assert ask(url, f"/sleep?level={level}&mode=keep") == {"status": "sleeping", "level": level}
        assert look(url, "/is_sleeping") == {"is_sleeping": True}
        before = computed(url)
        assert ask(url, "/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
        time.sleep(QUIET)
        assert computed(url) == before
        assert len(it.token_ids) < LONG
        assert ask(url, "/wake_up?tags=kv_cache") == {"status": "awake", "tags": ["kv_cache"]}
        assert look(url, "/is_sleeping") == {"is_sleeping": False}
        assert it.end()["finish_reason"] == "length"
        assert it.token_ids == alone["token_ids"]
    assert sampled(url, body([7, 8, 9], LONG)) == alone


def test_sleep_that_is_refused_stops_nothing(url: str) -> None:
    ask(url, "/begin_weight_update", {})
    try:
        with running(url, body([7], LONG)) as it:
            assert "update is open" in ask(url, "/sleep", status=409)["message"]
            assert look(url, "/is_paused") == {"is_paused": False}
            it.until(len(it.token_ids) + 2)
            assert not it.last
    finally:
        ask(url, "/pause_generation", {})  # discards the update
        ask(url, "/continue_generation", {})


def test_light_sleep_only_stops(url: str) -> None:
    ask(url, GENERATE, body(PROMPT, 1))
    assert ask(url, "/sleep?level=0&mode=keep") == {"status": "sleeping", "level": 0}
    assert look(url, "/is_paused") == {"is_paused": True}
    assert ask(url, "/wake_up?tags=scheduling") == {"status": "awake", "tags": ["scheduling"]}
    assert cached(url) > 40


def test_checks_of_the_weights(url: str) -> None:
    checksums = ask(url, "/weight_checker", {"action": "checksum"})["checksums"]
    assert len(checksums) == 21
    changed = checksums | {"model.norm.weight": "0", "none.weight": "0"}
    compared = ask(url, "/weight_checker", {"action": "compare", "baseline": changed})
    assert compared == {"match": False, "mismatches": ["model.norm.weight", "none.weight"]}
    assert (
        ask(url, "/weight_checker", {"action": "compare", "baseline": checksums})["match"] is True
    )
    ask(url, "/weight_checker", {"action": "reset"}, 501)


@pytest.mark.thorough
def test_versions_have_names(url: str) -> None:
    first = look(url, "/weight_info")["weight_version"]
    with running(url, body([7, 8, 9], LONG)) as it:  # naming a version never ends requests
        assert (
            ask(url, "/update_weight_version", {"new_version": "step-7"})["new_version"] == "step-7"
        )
        assert look(url, "/weight_info") == {"weight_version": "step-7"}
        assert it.end()["weight_versions"] == [{"version": "step-7", "start": 0, "end": LONG}]
    choice = ask(url, "/v1/completions", {"prompt": [5], "max_tokens": 1})["choices"][0]
    assert choice["weight_version"] == "step-7"
    ask(url, "/update_weight_version", {"new_version": first})


def test_trainers_first_requests_are_answered(url: str) -> None:
    assert look(url, "/get_world_size?include_dp=false") == {"world_size": 1}
    config = look(url, "/server_info?config_format=json")["vllm_config"]
    assert config["weight_transfer_config"] is not None
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["model_config"]["dtype"] == "torch.float32"
    assert (config["lora_config"], config["parallel_config"]["data_parallel_size"]) == (None, 1)
    assert isinstance(look(url, "/server_info?config_format=text")["vllm_config"], str)


@pytest.mark.parametrize(
    ("path", "given", "status", "named"),
    [
        ("/pause?mode=stop", None, 400, "mode"),
        ("/pause", {"clear_cache": 2}, 400, "clear_cache"),
        ("/sleep?level=3", None, 400, "level"),
        ("/sleep", {"mode": "deep"}, 400, "mode"),
        ("/wake_up?tags=weights&tags=all", None, 400, "tags"),
        ("/abort_requests", {"request_ids": [1]}, 400, "request_ids"),
        ("/inference/v1/abort_requests", {}, 400, "request_ids"),
        ("/weight_checker", {"action": "compare"}, 400, "baseline"),
        ("/weight_checker", {"action": "none"}, 400, "action"),
        ("/update_weight_version", {"new_version": ""}, 400, "new_version"),
        ("/server_info", None, 405, None),
        ("/init_weight_transfer_engine", None, 400, "init_info"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"master_address": "127.0.0.1"}},
            400,
            "master_port",
        ),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"nccl_unique_id_b64": "AA=="}},
            400,
            "nccl_unique_id_b64",
        ),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"nccl_unique_id_b64": ID, "world_size": 2}},
            400,
            "rank_offset",
        ),
        (
            "/init_weight_transfer_engine",
            {"init_info": ADDRESS | PLACE | {"nccl_unique_id_b64": ID}},
            400,
            "not both",
        ),
        (
            "/init_weight_transfer_engine",
            {"init_info": PLACE | {"nccl_unique_id_b64": ID}},  # this engine is on a CPU
            400,
            None,
        ),
        ("/start_weight_update", None, 409, None),
        ("/start_weight_update", {"is_checkpoint_format": False}, 400, None),
        ("/update_weights", {"update_info": {}}, 409, None),
        ("/finish_weight_update", {}, 409, None),
    ],
)
def test_vllm_routes_reject_invalid_calls(
    url: str, path: str, given: Any, status: int, named: str | None
) -> None:
    reply = ask(url, path, given, status)
    assert reply["success"] is False
    assert reply["message"] == reply["error"]["message"]
    if named is not None:
        assert named in reply["message"]
    assert look(url, "/weight_info")["weight_version"] == "0"


def test_shutdown_without_a_group_has_nothing_to_do(url: str) -> None:
    assert ask(url, "/shutdown_weight_transfer_engine") == {"message": "Weight transfer shut down"}


@pytest.mark.thorough
def test_bodies_may_be_missing_or_empty(url: str) -> None:
    for content in (None, b"", b"{}"):
        for path in (
            "/pause",
            "/resume",
            "/abort_requests",
            "/reset_prefix_cache",
            "/sleep",
            "/wake_up",
        ):
            assert httpx.post(url + path, content=content, timeout=30).status_code == 200, path
