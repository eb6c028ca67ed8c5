"""Weights that a trainer process lends on the engine's card: SGLang's and vLLM's pickles and this
package's JSON, through the server, with shared memory of the machine as the card's.
"""

import base64
import json
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nano_inference.parallel import card_memory
from nano_inference.server.main import running_server
from tests.server.trainers.children import Child
from tests.server.trainers.conftest import RL, engine_config
from tests.server.trainers.group_trainer import new_weights
from tests.server.trainers.host_card import HostCard
from tests.server.trainers.lender import OTHER_CARD, SHARED
from tests.server.trainers.sglang_trainer import checksums, checksums_of, post, version

TENSOR, IPC = "/update_weights_from_tensor", "/update_weights_from_ipc"
INIT, START, UPDATE, FINISH = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")


class Lender(Child):
    """The trainer's process."""

    def __init__(self, folder: Path) -> None:
        super().__init__("tests.server.trainers.lender", str(folder))
        self.folder = folder
        assert self.hear() == "ready"

    def ask(self, do: str, **more: Any) -> Any:
        self.write(json.dumps({"do": do, **more}))
        return json.loads(self.hear())

    def close(self) -> None:
        """Kill the process and remove what it left in shared memory."""
        super().close()
        pid = self.process.pid
        for pattern in (f"nano-lent-{pid}-*", f"torch_{pid}_{pid + 7}_0"):
            for path in SHARED.glob(pattern):
                path.unlink()

    def sums(self, seed: int) -> dict[str, str]:
        return checksums_of(new_weights(self.folder, seed))


@pytest.fixture(scope="module")
def url(tiny_folder: Path) -> Iterator[str]:
    with running_server(engine_config(tiny_folder), RL) as url:
        yield url


@pytest.fixture(scope="module")
def lenders() -> Iterator[list[Lender]]:
    lenders: list[Lender] = []
    yield lenders
    for lender in lenders:
        lender.close()


@pytest.fixture
def lender(tiny_folder: Path, lenders: list[Lender]) -> Lender:
    """Yield a lender. All tests share it unless one kills it."""
    if not lenders or lenders[-1].process.poll() is not None:
        lenders.append(Lender(tiny_folder))
    return lenders[-1]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> HostCard:
    card = HostCard()
    monkeypatch.setattr(card_memory, "card_of", lambda _: card)
    return card


def bucket_of(*texts: str, **more: Any) -> dict[str, Any]:
    return {"serialized_named_tensors": [*texts], "load_format": "flattened_bucket", **more}


# -- SGLang ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "numbers"])
def test_flattened_bucket_is_served(url: str, lender: Lender, card: HostCard, kind: str) -> None:
    text = lender.ask("bucket", seed=11, kind=kind)
    post(url, TENSOR, bucket_of(text, flush_cache=True, weight_version=f"lent {kind}"))
    assert (checksums(url), version(url)) == (lender.sums(11), f"lent {kind}")
    assert card.close_all() == 1
    assert card.num_settled == 1


@pytest.mark.parametrize("transposed", [False, True])
def test_named_tensors_are_served(
    url: str, lender: Lender, card: HostCard, transposed: bool
) -> None:
    text = lender.ask("direct", seed=12 + transposed, transposed=transposed)
    post(url, TENSOR, {"serialized_named_tensors": [text]})
    assert checksums(url) == lender.sums(12 + transposed)
    assert card.close_all() == len(new_weights(lender.folder, 0))


def test_lent_memory_may_be_reused_after_the_answer(
    url: str, lender: Lender, card: HostCard
) -> None:
    """In a pause the bucket waits for others, and the trainer writes the next one to its memory."""
    post(url, "/pause_generation")
    post(url, TENSOR, bucket_of(lender.ask("bucket", seed=14)))
    assert card.close_all() == 1
    lender.ask("scribble")
    assert version(url) != "14"
    post(url, "/continue_generation")
    assert checksums(url) == lender.sums(14)


def test_bucket_count_is_that_of_engines(url: str, lender: Lender, card: HostCard) -> None:
    text = lender.ask("bucket", seed=15)
    message = post(url, TENSOR, bucket_of(text, text), 400)["message"]
    assert "has 2 entries" in message
    assert "the 1 engines" in message
    assert not card.opened


# -- vLLM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["function", "arguments", "packed"])
def test_vllm_handles_are_served(url: str, lender: Lender, card: HostCard, kind: str) -> None:
    seed = 20 + len(kind)
    post_plain(url, INIT, {"init_info": {}})
    post_plain(url, START, {})
    post_plain(url, UPDATE, {"update_info": lender.ask("vllm", seed=seed, kind=kind)})
    lender.ask("scribble")
    post_plain(url, FINISH, {"weight_version": kind})
    assert (checksums(url), version(url)) == (lender.sums(seed), kind)
    assert card.close_all() >= 1
    post_plain(url, "/shutdown_weight_transfer_engine", {})


def test_vllm_handles_need_their_transfer(url: str, lender: Lender) -> None:
    assert "/init_weight_transfer_engine" in post_plain(url, START, {}, 409)
    post_plain(url, INIT, {"init_info": {}})
    post_plain(url, START, {})
    message = post_plain(url, UPDATE, {"update_info": {"names": [], "dtype_names": []}}, 400)
    assert "ipc_handles_pickled is missing" in message
    post_plain(url, "/shutdown_weight_transfer_engine", {})
    assert "/init_weight_transfer_engine" in post_plain(url, START, {}, 409)


def post_plain(url: str, path: str, body: Any, status: int = 200) -> str:
    reply = httpx.post(url + path, json=body, timeout=30)
    assert reply.status_code == status, reply.text
    return "" if status == 200 else reply.json()["error"]["message"]


# -- this package ----------------------------------------------------------------------------------


def test_offers_are_served(url: str, lender: Lender, card: HostCard) -> None:
    offers = lender.ask("offers", seed=31)
    elsewhere = lender.ask("offers", seed=32, card=OTHER_CARD)
    post(url, IPC, {"offers": elsewhere + offers, "weight_version": "own"})
    assert (checksums(url), version(url)) == (lender.sums(31), "own")
    assert card.close_all() == len(new_weights(lender.folder, 0))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "offers is missing"),
        ({"offers": 3}, "not a list of offers"),
        ({"offers": []}, "must list offers"),
        ({"offers": [{"storages": [], "tensors": []}]}, "must list offers"),
        ({"offers": [{"storages": [{}], "tensors": []}]}, "missing required field"),
        ({"offers": [{"tensors": []}]}, "missing required field"),
    ],
)
def test_offers_are_checked(url: str, body: Any, message: str) -> None:
    assert message in post(url, IPC, body, 400)["message"]


def test_checkpoint_engine_sockets_are_not_supported(url: str) -> None:
    assert "zmq_handles" in post(url, IPC, {"zmq_handles": {"a": "ipc://b"}}, 501)["message"]


# -- faults ----------------------------------------------------------------------------------------

# changes of a correct bucket -> part of the error
FALSE_BUCKETS: dict[str, tuple[dict[str, Any], str]] = {
    "number of the card": ({"device": 0}, "trainer's number 0"),
    "another card": ({"device": OTHER_CARD}, f"the handles are for {OTHER_CARD}"),
    "start beyond": ({"start": 2**40}, "offsets must be inside it"),
    "negative start": ({"start": -8}, "offsets must be inside it"),
    "small storage": ({"size": 100}, "offsets must be inside it"),
    "huge storage": ({"size": 2**60}, "both must be in"),
    "negative offset": ({"offset": -1}, "both must be in"),
    "start is text": ({"start": "0"}, "not an integer"),
    "expandable segment": ({"handle": "\x02e" + "x" * 64}, "expandable_segments:False"),
    "short handle": ({"handle": "x"}, "has 1 bytes"),
    "no such memory": ({"handle": "\x02c" + "nobody".ljust(64, "\0")}, "cannot be opened"),
    "counter index": ({"index": 10_000}, "must be in [0, 10000)"),
    "negative counter": ({"index": -1}, "must be in [0, 10000)"),
    "counter file": ({"counter": "/etc/passwd"}, "not the name of a counter file"),
    "counter path": ({"counter": "/torch_1_2_3/../x"}, "not the name of a counter file"),
    "event": ({"event": "x"}, "event handle has 1 bytes"),
    "end moved": ({"end_idx": 4}, "indices"),
    "part beyond": ({"start_idx": 400, "end_idx": 400}, "of a bucket of"),
}


@pytest.mark.parametrize("why", FALSE_BUCKETS)
def test_false_bucket_changes_nothing(url: str, lender: Lender, card: HostCard, why: str) -> None:
    changes, message = FALSE_BUCKETS[why]
    before = checksums(url), version(url)
    reply = httpx.post(url + TENSOR, json=bucket_of(lender.ask("bucket", seed=41, **changes)))
    assert reply.status_code in (400, 504), reply.text
    assert message in reply.json()["message"]
    assert not card.opened
    assert (checksums(url), version(url)) == before


def test_false_bucket_ends_what_was_gathered(url: str, lender: Lender) -> None:
    before = checksums(url)
    post(url, "/pause_generation")
    post(url, TENSOR, bucket_of(lender.ask("bucket", seed=42)))
    post(url, TENSOR, bucket_of(lender.ask("bucket", seed=42, index=-1)), 400)
    post(url, "/continue_generation")
    assert checksums(url) == before


class Runs:
    """Object whose pickle makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("path", [TENSOR, UPDATE])
def test_executing_pickle_is_rejected_by_name(
    url: str, card: HostCard, tmp_path: Path, path: str
) -> None:
    mark = tmp_path / "ran"
    text = base64.b64encode(pickle.dumps([("a", Runs(mark))])).decode()
    body: dict[str, Any] = bucket_of(text)
    if path == UPDATE:
        post_plain(url, INIT, {"init_info": {}})
        post_plain(url, START, {})
        info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
        body = {"update_info": info | {"ipc_handles_pickled": text}}
    message = post_plain(url, path, body, 400)
    assert "names 'posix.mkdir', which is not allowed" in message
    assert not mark.exists()
    assert not card.opened
    post_plain(url, "/shutdown_weight_transfer_engine", {})


@pytest.mark.parametrize("part", [1, 2, 30, -1])
def test_truncated_pickle_is_rejected(url: str, lender: Lender, card: HostCard, part: int) -> None:
    content = base64.b64decode(lender.ask("bucket", seed=43))
    length = part if part > 0 else len(content) - 1
    text = base64.b64encode(content[:length]).decode()
    assert "not a whole pickle" in post_plain(url, TENSOR, bucket_of(text), 400)
    assert not card.opened


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": [[1]]}, "is described as"),
        ({"dtype_names": ["bfloat16"]}, "is described as"),
        ({"names": ["model.nobody.weight"]}, "not a tensor of this model"),
        ({"names": ["a", "b"]}, "equal length"),
        ({"ipc_handles": [{}]}, "ipc_handles is not supported in JSON"),
        ({"ipc_handles_pickled": "?"}, "not valid base64"),
    ],
)
def test_false_vllm_handles_change_nothing(
    url: str, lender: Lender, card: HostCard, changes: dict[str, Any], message: str
) -> None:
    before = checksums(url)
    info = lender.ask("vllm", seed=44, kind="arguments")
    for name, value in changes.items():
        if isinstance(value, list) and isinstance(info.get(name), list) and len(value) == 1:
            value = [*value, *info[name][1:]]
        info[name] = value
    post_plain(url, INIT, {"init_info": {}})
    post_plain(url, START, {})
    assert message in post_plain(url, UPDATE, {"update_info": info}, 400)
    assert not card.opened
    post_plain(url, "/shutdown_weight_transfer_engine", {})
    assert checksums(url) == before


@pytest.mark.parametrize(
    ("sizes", "message"),
    [(None, "must list the bytes"), ([], "must list the bytes"), ("first + 4", "expected")],
)
def test_packed_sizes_are_checked(
    url: str, lender: Lender, card: HostCard, sizes: Any, message: str
) -> None:
    info = lender.ask("vllm", seed=45, kind="packed")
    first, *rest = info["tensor_sizes"]
    info["tensor_sizes"] = [first + 4, *rest] if sizes == "first + 4" else sizes
    post_plain(url, INIT, {"init_info": {}})
    post_plain(url, START, {})
    assert message in post_plain(url, UPDATE, {"update_info": info}, 400)
    assert not card.opened
    post_plain(url, "/shutdown_weight_transfer_engine", {})


def test_dead_lender_is_reported(url: str, lender: Lender, card: HostCard) -> None:
    before, text = checksums(url), lender.ask("bucket", seed=46)
    lender.interrupt(signal.SIGKILL)
    assert lender.hear() == "ended"
    message = post_plain(url, TENSOR, bucket_of(text), 504)
    assert f"process {lender.process.pid}, which lends the weights, does not exist" in message
    assert not card.opened
    assert checksums(url) == before


def test_lender_killed_in_a_copy_changes_nothing(url: str, lender: Lender, card: HostCard) -> None:
    before, text = checksums(url), lender.ask("bucket", seed=47)

    def kill() -> None:
        lender.process.kill()
        lender.process.wait()

    card.on_open = kill
    assert "does not exist" in post_plain(url, TENSOR, bucket_of(text), 504)
    assert card.close_all() == 1
    assert checksums(url) == before


def test_withdrawn_memory_is_reported(url: str, lender: Lender, card: HostCard) -> None:
    text = lender.ask("bucket", seed=48)
    lender.ask("withdraw")
    assert "no longer lends" in post_plain(url, TENSOR, bucket_of(text), 504)
    assert not card.opened
    lender.close()


def test_handles_close_after_an_error(url: str, lender: Lender, card: HostCard) -> None:
    """NaN is found in open memory."""
    before, text = checksums(url), lender.ask("bucket", seed=49)
    card.on_open = lambda: lender.ask("scribble", byte=0xFF)
    assert "NaN" in post_plain(url, TENSOR, bucket_of(text), 400)
    assert card.close_all() == 1
    assert checksums(url) == before


def test_engine_on_a_cpu_opens_nothing(
    url: str, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    text = lender.ask("bucket", seed=50)
    assert "the model is on 'cpu'" in post_plain(url, TENSOR, bucket_of(text), 400)
