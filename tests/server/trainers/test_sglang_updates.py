"""Weights over a group in the manner of slime, Miles and AReaL, and faults on the way."""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from nano_inference.checkpoints.loading import resolve_model
from nano_inference.config import EngineConfig
from nano_inference.server.main import running_server
from tests.server.trainers.conftest import RL, engine_config
from tests.server.trainers.golden import replay
from tests.server.trainers.group_trainer import new_weights
from tests.server.trainers.sglang_trainer import (
    GROUP,
    Trainer,
    checksums,
    checksums_of,
    free_port,
    post,
    rollout,
    told_of,
    trainer_of,
    version,
)
from tests.standing import dawdling

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def url(tiny_folder: Path) -> Iterator[str]:
    with running_server(engine_config(tiny_folder), RL) as url:
        yield url


@pytest.fixture(scope="module")
def trainers(url: str, tiny_folder: Path) -> Iterator[list[Trainer]]:
    """Yield a function that returns a trainer. All tests share it unless one kills it."""
    trainers: list[Trainer] = []
    yield trainers
    for trainer in trainers:
        trainer.close()


@pytest.fixture
def trainer(url: str, tiny_folder: Path, trainers: list[Trainer]) -> Trainer:
    """Yield a trainer whose group has formed. The pause discards leftovers of earlier tests."""
    post(url, "/pause_generation")
    post(url, "/continue_generation")
    if not trainers or trainers[-1].process.poll() is not None:
        trainers.append(Trainer(url, tiny_folder))
    else:
        leave(trainers[-1])
    trainers[-1].join()
    return trainers[-1]


def leave(trainer: Trainer) -> None:
    """Leave on both sides. The engine may have left already after a failed broadcast."""
    httpx.post(f"{trainer.url}/destroy_weights_update_group", json={"group_name": GROUP})
    trainer.say("leave", name=GROUP)
    trainer.hear()


def update(trainer: Trainer, name: str, seed: int = 1) -> None:
    """Run a whole update, which must work after any fault."""
    trainer.send(seed, list(new_weights(trainer.folder, seed)), weight_version=name)
    assert version(trainer.url) == name
    assert checksums(trainer.url) == checksums_of(new_weights(trainer.folder, seed))


MODES = ("abort", "retract", "in_place")


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
def test_slime_like_trainer(tiny_folder: Path, mode: str) -> None:
    """Run the example in a separate process, with rollouts in flight."""
    with running_server(engine_config(tiny_folder), RL) as url:
        run_example(url, tiny_folder, mode, "--bucket-bytes", "60000")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_slime_like_trainer_of_smollm2(mode: str) -> None:
    """Run the engine in a separate process, as servers do."""
    config = dataclasses.replace(RL, in_process=False, rl_timeout=120.0)
    engine = EngineConfig(
        "smollm2-135m", device="cpu", max_model_len=512, kv_cache_memory=2**27, num_threads=1
    )
    with running_server(engine, config) as url:
        run_example(url, resolve_model("smollm2-135m"), mode, "--max-tokens", "96")


def run_example(url: str, folder: Path, mode: str, *options: str) -> None:
    command = [sys.executable, "examples/slime_like.py", url, str(folder), "--mode", mode, *options]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["version"] == 2
    assert report["buckets"] >= 6
    assert report["crossed"] > 0
    assert (report["aborts"] > 0) == (mode == "abort")
    assert httpx.get(f"{url}/v1/loads").json()["loads"][0]["num_total_reqs"] == 0


@pytest.mark.thorough
def test_request_outside_of_a_pause_is_an_update(trainer: Trainer) -> None:
    """Update outside of a pause: decoding continues, and the sample has tokens of all versions."""
    first, second = trainer.buckets(2)
    with rollout(trainer.url) as asked:
        with dawdling():
            trainer.send(11, first, weight_version="a")
        assert version(trainer.url) == "a"
        trainer.send(11, second, weight_version="b")
        assert version(trainer.url) == "b"
        meta = asked.result(30)["meta_info"]
    names = [span["version"] for span in meta["weight_versions"]]
    assert meta["finish_reason"]["type"] == "length"
    assert names[-1] in ("a", "b")  # the request may have ended before the second update
    assert len(names) > 1
    assert checksums(trainer.url) == checksums_of(new_weights(trainer.folder, 11))


@pytest.mark.thorough
def test_areal_sends_no_flush_and_no_version(trainer: Trainer) -> None:
    before = version(trainer.url)
    post(trainer.url, "/pause_generation", {})
    for bucket in trainer.buckets(3):
        weights = {
            name: each for name, each in new_weights(trainer.folder, 12).items() if name in bucket
        }
        request = told_of(weights, abort_all_requests=True)
        del request["flush_cache"]
        asked = trainer.beside(post, trainer.url, "/update_weights_from_distributed", request)
        trainer.say("send", group=GROUP, names=bucket, seed=12)
        asked.result(30)
        assert trainer.hear() == "done"
        assert version(trainer.url) == before
    post(trainer.url, "/continue_generation", {})
    assert version(trainer.url) != before
    assert checksums(trainer.url) == checksums_of(new_weights(trainer.folder, 12))


@pytest.mark.thorough
def test_flattened_bucket_is_one_broadcast(trainer: Trainer) -> None:
    weights = new_weights(trainer.folder, 13)
    asked = trainer.beside(
        post,
        trainer.url,
        "/update_weights_from_distributed",
        told_of(weights, load_format="flattened_bucket"),
    )
    trainer.say("send", group=GROUP, seed=13, packed_bytes=1 << 40)
    asked.result(30)
    assert trainer.hear() == "done"
    assert checksums(trainer.url) == checksums_of(weights)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "status", "told"),
    [
        ({"names": ["model.nothing.weight"]}, 400, "model.nothing.weight"),
        ({"shapes": [[3, 3]]}, 400, "shape"),
        ({"dtypes": ["complex64"]}, 400, "complex64"),
        ({"group_name": "another"}, 409, "group 'another' does not exist"),
        ({"dtypes": []}, 400, "lists of equal length"),
    ],
)
def test_mismatched_tensor_ends_the_update_and_the_next_works(
    trainer: Trainer, changes: dict[str, Any], status: int, told: str
) -> None:
    url, before, served = trainer.url, version(trainer.url), checksums(trainer.url)
    post(url, "/pause_generation")
    trainer.send(14, trainer.buckets(2)[0], weight_version="broken")
    weights = {"model.norm.weight": new_weights(trainer.folder, 14)["model.norm.weight"]}
    assert (
        told
        in post(url, "/update_weights_from_distributed", told_of(weights) | changes, status)[
            "message"
        ]
    )
    post(url, "/continue_generation")
    # earlier buckets are discarded too
    assert (version(url), checksums(url)) == (before, served)
    leave(trainer)
    trainer.join()
    update(trainer, f"after {told}")


@pytest.mark.thorough
def test_second_trainer_is_kept_out_while_the_first_lives(trainer: Trainer) -> None:
    url = trainer.url
    assert "its trainer is alive" in trainer.join(409)["message"]
    post(url, "/pause_generation")
    trainer.send(15, trainer.buckets(2)[0])
    assert "a weight update is open" in trainer.join(409, group_name="another")["message"]
    post(url, "/continue_generation")
    update(trainer, "still-mine")


@pytest.mark.thorough
def test_trainer_that_died_comes_again(trainer: Trainer) -> None:
    """Kill the trainer between two buckets: its tensors must not mix with those of the next one."""
    url, before, served = trainer.url, version(trainer.url), checksums(trainer.url)
    post(url, "/pause_generation")
    trainer.send(16, trainer.buckets(2)[0], weight_version="half")
    trainer.process.kill()
    trainer.process.wait()
    with trainer_of(url, trainer.folder) as again:
        again.join()  # slime creates its group before the pause
        post(url, "/continue_generation")
        assert (version(url), checksums(url)) == (before, served)
        update(again, "again")


@pytest.mark.thorough
def test_trainer_killed_amid_a_bucket(trainer: Trainer) -> None:
    url, before, served = trainer.url, version(trainer.url), checksums(trainer.url)
    weights = new_weights(trainer.folder, 17)
    with rollout(url) as asked:
        failing = trainer.beside(
            post, url, "/update_weights_from_distributed", told_of(weights), 504
        )
        time.sleep(0.3)  # waits for the first tensor
        trainer.process.kill()
        began = time.monotonic()
        failing.result(30)
        assert time.monotonic() - began < 15
        assert asked.result(30)["meta_info"]["finish_reason"]["type"] == "length"
    assert (version(url), checksums(url)) == (before, served)
    with trainer_of(url, trainer.folder) as again:
        again.join()
        update(again, "killed-and-back")


@pytest.mark.thorough
def test_missing_tensor_has_a_deadline(trainer: Trainer) -> None:
    weights, before = new_weights(trainer.folder, 18), version(trainer.url)
    reply = post(trainer.url, "/update_weights_from_distributed", told_of(weights, timeout=1), 504)
    assert "within" in reply["message"]
    group = {
        "master_address": "127.0.0.1",
        "master_port": "9",
        "rank_offset": 1,
        "world_size": 2,
        "timeout": 1,
    }
    assert "no trainer" in post(trainer.url, "/init_weights_update_group", group, 504)["message"]
    assert version(trainer.url) == before


@pytest.mark.thorough
def test_group_that_was_left_can_be_made_again(trainer: Trainer) -> None:
    post(trainer.url, "/destroy_weights_update_group", {"group_name": GROUP})
    trainer.say("leave", name=GROUP)
    assert trainer.hear() == "done"
    post(trainer.url, "/destroy_weights_update_group", {"group_name": GROUP}, 404)
    trainer.join()
    update(trainer, "made-again")


@pytest.mark.thorough
def test_golden_exchanges(tiny_folder: Path, request: pytest.FixtureRequest) -> None:
    """Compare exchanges of the routes that need a trainer."""
    with (
        running_server(engine_config(tiny_folder), RL) as url,
        trainer_of(url, tiny_folder) as trainer,
    ):
        port = free_port()
        buckets = iter(trainer.buckets(2))

        @contextmanager
        def joining() -> Iterator[None]:
            trainer.say("join", name=GROUP, port=port, named=True)
            yield
            assert trainer.hear() == "done"

        @contextmanager
        def sending() -> Iterator[None]:
            trainer.say("send", group=GROUP, names=next(buckets), seed=1)
            yield
            assert trainer.hear() == "done"

        beside = {"join": joining, "send": sending}
        update = request.config.getoption("--update-golden")
        replay(url, "with_trainers/sglang", {"<port>": str(port)}, update=update, beside=beside)
