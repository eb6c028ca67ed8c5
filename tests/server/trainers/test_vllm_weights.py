"""Weights by vLLM's routes: real bytes from a trainer process, requests in flight, and faults."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.server.main import running_server
from tests.server.trainers.asking import GENERATE, ask, body, look, running
from tests.server.trainers.children import GroupTrainer
from tests.server.trainers.conftest import RL, engine_config
from tests.server.trainers.golden import replay
from tests.server.trainers.group_trainer import new_weights
from tests.server.trainers.weight_runs import checksums, free_port

LONG = 430
INIT, START, UPDATE, FINISH = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)


class Trainer(GroupTrainer):
    """A `group_trainer` and its HTTP requests."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(folder)
        self.url = url

    def join(self, **info: Any) -> dict[str, Any]:
        port = free_port()
        self.say("join", name="group", port=port)
        address = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
        }
        reply = ask(self.url, INIT, {"init_info": address | info})
        assert self.hear() == "done"
        return reply

    def update(self, seed: int, **info: Any) -> dict[str, Any]:
        """Send one `/update_weights` and its broadcasts."""
        request = described(self.folder)
        self.say("send", group="group", seed=seed, packed_bytes=info.pop("send_packed", None))
        reply = ask(self.url, UPDATE, {"update_info": request | info})
        assert self.hear() == "done"
        return reply


def described(folder: Path) -> dict[str, Any]:
    tensors = new_weights(folder, 0)
    return {
        "names": list(tensors),
        "dtype_names": ["float32"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def serving(url: str) -> tuple[str, dict[str, str]]:
    reply = ask(url, "/weight_checker", {"action": "checksum"})["checksums"]
    return look(url, "/weight_info")["weight_version"], reply


@pytest.fixture(scope="module")
def url(tiny_folder: Path) -> Iterator[str]:
    threads = torch.get_num_threads()
    with running_server(engine_config(tiny_folder), RL) as url:
        yield url
        ask(url, "/shutdown_weight_transfer_engine")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def lasting(url: str, tiny_folder: Path) -> Iterator[Trainer]:
    trainer = Trainer(url, tiny_folder)
    yield trainer
    trainer.close()


@pytest.fixture
def trainer(lasting: Trainer) -> Iterator[Trainer]:
    """Yield a shared process that leaves its group at the end of each test."""
    yield lasting
    ask(lasting.url, "/wake_up")
    ask(lasting.url, "/shutdown_weight_transfer_engine")
    lasting.say("leave_all")
    assert lasting.hear() == "done"


@pytest.fixture
def start(url: str, tiny_folder: Path) -> Iterator[Callable[[], Trainer]]:
    """Yield a factory of trainers that may die."""
    trainers: list[Trainer] = []

    def new() -> Trainer:
        trainers.append(Trainer(url, tiny_folder))
        return trainers[-1]

    yield new
    ask(url, "/shutdown_weight_transfer_engine")
    for trainer in trainers:
        trainer.close()


@pytest.mark.thorough(cases=["no", "by the group"])
@pytest.mark.parametrize("packed", ["no", "by the group", "small runs", "by the update"])
def test_trainers_bytes_arrive(url: str, tiny_folder: Path, trainer: Trainer, packed: str) -> None:
    size = {"no": None, "by the group": 1 << 30, "small runs": 20_000, "by the update": 1 << 30}[
        packed
    ]
    group: dict[str, Any] = {} if packed in ("no", "by the update") else {"packed": True}
    if packed == "small runs":
        group["packed_buffer_size_bytes"] = size
    assert trainer.join(**group) == {"message": "Weight transfer initialized"}
    before = int(look(url, "/weight_info")["weight_version"])
    assert ask(url, START) == {"message": "Weight update started"}
    more = {"packed": True} if packed == "by the update" else {}
    assert trainer.update(1, send_packed=size, **more) == {"message": "Weights updated"}
    # no part is live before the update is complete
    assert look(url, "/weight_info")["weight_version"] == str(before)
    assert ask(url, FINISH) == {"message": "Weight update finished"}
    assert serving(url) == (str(before + 1), checksums(tiny_folder, 1))
    ask(url, START, {"is_checkpoint_format": True})
    trainer.update(2, send_packed=size, **more)
    ask(url, FINISH, {"weight_version": str(before + 7)})
    assert serving(url) == (str(before + 7), checksums(tiny_folder, 2))
    assert ask(url, "/shutdown_weight_transfer_engine") == {"message": "Weight transfer shut down"}


@pytest.mark.thorough
def test_requests_in_flight_report_the_version_of_each_token(url: str, trainer: Trainer) -> None:
    trainer.join()
    before = look(url, "/weight_info")["weight_version"]
    with running(url, body([7, 8, 9], LONG)) as it:
        ask(url, START)
        trainer.update(3)
        ask(url, FINISH, {"weight_version": "step-9"})
        last = it.end()
    assert last["finish_reason"] == "length"
    old, new = last["weight_versions"]
    assert (old["version"], old["start"], new["version"], new["end"]) == (before, 0, "step-9", LONG)
    assert 2 <= old["end"] == new["start"] < LONG
    assert last["weight_version"] == "step-9"


@pytest.mark.thorough
def test_recomputed_tokens_follow_the_pause_mode(url: str, trainer: Trainer) -> None:
    trainer.join()
    computed: list[int] = []
    for clear_cache in ("false", "true"):
        before = look(url, "/stats")["engine"]["tokens_computed"]
        with running(url, body(list(range(3, 203)), 300)) as it:
            ask(url, f"/pause?mode=keep&clear_cache={clear_cache}")
            ask(url, START)
            trainer.update(4)
            ask(url, FINISH)
            ask(url, "/resume")
            assert it.end()["finish_reason"] == "length"
        computed.append(look(url, "/stats")["engine"]["tokens_computed"] - before)
        ask(url, "/reset_prefix_cache")
    assert computed[0] < 200 + 300 + 10
    assert computed[1] > computed[0] + 200


def test_wrong_order_changes_nothing(url: str, tiny_folder: Path, trainer: Trainer) -> None:
    before = serving(url)
    fields = {"update_info": described(tiny_folder)}
    assert "start" in ask(url, UPDATE, fields, 409)["message"]
    trainer.join()
    ask(url, FINISH, None, 409)
    ask(url, START)
    ask(url, START, None, 409)
    port = free_port()
    second = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    ask(url, INIT, {"init_info": second}, 409)
    ask(url, "/shutdown_weight_transfer_engine", None, 409)
    assert serving(url) == before
    trainer.update(5)
    ask(url, FINISH)
    assert serving(url)[1] == checksums(tiny_folder, 5)
    ask(url, FINISH, None, 409)
    assert "start" in ask(url, UPDATE, fields, 409)["message"]
    assert "no weight transfer group" in ask(url, START, None, 409)["message"], (
        "it may have sent already"
    )


def changed(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"update_info": described(folder) | changes}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"names": ["none.weight"] * 21}, "none.weight"),
    ({"shapes": [[1, 2]] * 21}, "shape"),
    ({"dtype_names": ["int3"] * 21}, "int3"),
    ({"names": []}, "equal length"),
    ({"shapes": [["x"]] * 21}, "shape"),
    ({"num_updates_list": [1]}, "num_updates_list"),
    ({"packed": 3}, "packed"),
]


def test_mismatched_tensor_ends_the_update(url: str, tiny_folder: Path, trainer: Trainer) -> None:
    before = serving(url)
    for wrong, said in WRONG:
        trainer.join()
        ask(url, START)
        reply = ask(url, UPDATE, changed(tiny_folder, **wrong), 400)
        assert said in reply["message"]
        ask(url, FINISH, None, 409)  # the update no longer exists
        # nor does the group: its bytes must not enter the next update
        ask(url, START, None, 409)
        assert serving(url) == before
        trainer.say("leave", name="group")
        assert trainer.hear() == "done"
    trainer.join()
    ask(url, START)
    trainer.update(8)
    ask(url, FINISH)
    assert serving(url)[1] == checksums(tiny_folder, 8)


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before it sends", "amid its tensors"])
def test_trainer_that_dies_is_followed_by_another(
    url: str, tiny_folder: Path, start: Callable[[], Trainer], when: str
) -> None:
    before = serving(url)
    trainer = start()
    trainer.join()
    ask(url, START)
    if when == "before it sends":
        trainer.close()
    else:
        trainer.say("send", group="group", seed=6, then_signal=[5, signal.SIGKILL])
    with running(url, body([7, 8, 9], 50)) as it:
        began = time.monotonic()
        reply = ask(url, UPDATE, changed(tiny_folder), 409 if when == "before it sends" else 504)
        assert time.monotonic() - began < 15
        assert it.end()["finish_reason"] == "length"
    assert reply["success"] is False
    ask(url, FINISH, None, 409)
    assert serving(url) == before
    other = start()
    other.join()
    ask(url, START)
    other.update(6)
    ask(url, FINISH)
    assert serving(url)[1] == checksums(tiny_folder, 6)


@pytest.mark.thorough
def test_group_that_never_forms_has_a_deadline(tiny_folder: Path) -> None:
    with running_server(engine_config(tiny_folder), replace(RL, rl_timeout=1.0)) as url:
        info = {
            "master_address": "127.0.0.1",
            "master_port": free_port(),
            "rank_offset": 1,
            "world_size": 2,
        }
        began = time.monotonic()
        ask(url, INIT, {"init_info": info}, 504)
        assert time.monotonic() - began < 15
        ask(url, START, None, 409)
        ask(url, GENERATE, body([5], 2))


def test_weights_that_sleep_take_no_update(url: str, tiny_folder: Path, trainer: Trainer) -> None:
    trainer.join()
    ask(url, "/sleep?level=1")
    ask(url, START, None, 409)
    ask(url, "/wake_up?tags=weights")
    ask(url, START)
    trainer.update(7)
    ask(url, FINISH)
    assert ask(url, "/wake_up") == {"status": "awake", "tags": None}
    assert serving(url)[1] == checksums(tiny_folder, 7)


@pytest.mark.thorough
def test_golden_exchanges(tiny_folder: Path, request: pytest.FixtureRequest) -> None:
    port, names = free_port(), ["model.norm.weight", "model.layers.0.input_layernorm.weight"]
    with running_server(engine_config(tiny_folder), RL) as url:
        trainer = Trainer(url, tiny_folder)

        @contextmanager
        def doing(**told: Any) -> Iterator[None]:
            trainer.say(**told)
            yield
            assert trainer.hear() == "done"

        beside = {
            "joins": lambda: doing(do="join", name="group", port=port),
            "sends": lambda: doing(
                do="send", group="group", names=names, seed=1, packed_bytes=1 << 30
            ),
        }
        update = request.config.getoption("--update-golden")
        try:
            replay(url, "with_trainers/vllm", {'"<port>"': str(port)}, update=update, beside=beside)
        finally:
            trainer.close()
