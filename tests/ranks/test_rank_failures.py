"""Failures outside the steps of an engine with several ranks: bounded waits, full cleanup."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from nano_inference import (
    EngineConfig,
    EngineDead,
    InferenceEngine,
    LacksMemoryToWake,
    SamplingParams,
    WeightUpdateError,
)
from nano_inference.device.sleep import Sleep
from nano_inference.ranks import worker_group
from nano_inference.ranks.runner import RankedRunner
from nano_inference.ranks.shard import Shard
from nano_inference.ranks.sharing import SentUpdates
from nano_inference.weights.update import WeightUpdate
from tests.models.tiny import tiny_model
from tests.parallel.test_meshes import changed
from tests.ranks.rank_threads import ThreadHandle, ThreadLauncher


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    yield tiny_model(tmp_path_factory.mktemp("failures") / "model", "llama", num_hidden_layers=1)
    torch.set_num_threads(threads)


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> list[Shard]:
    """Return the other ranks of the engines that are built."""
    made: list[Shard] = []
    born = Shard.__init__

    def noted(self: Shard, *arguments: Any) -> None:
        made.append(self)
        born(self, *arguments)

    monkeypatch.setattr(Shard, "__init__", noted)
    return made


def config_of(folder: Path, **options: Any) -> EngineConfig:
    common: dict[str, Any] = {
        "device": "cpu",
        "backend": "reference",
        "num_threads": 1,
        "tensor_parallel": 2,
    }
    return EngineConfig(str(folder), **(common | {"kv_cache_memory": 2**20, "seed": 1} | options))


@pytest.fixture
def pair(folder: Path, shards: list[Shard]) -> Iterator[InferenceEngine]:
    with InferenceEngine(config_of(folder), ThreadLauncher()) as engine:
        yield engine


@pytest.mark.thorough(cases=["shut down"])
@pytest.mark.parametrize("how", ["shut down", "failed"])
def test_engine_end_reaches_callers_waiting_for_a_rank(
    pair: InferenceEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """One thread waits for all ranks to accept an update while another ends the engine."""
    asked, let_go = threading.Event(), threading.Event()

    def never(*_: Any, **__: Any) -> None:
        asked.set()
        let_go.wait(30)

    def fails(*_: Any) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(worker_group, "STOP_PATIENCE", 0.1)
    monkeypatch.setattr(Shard, "_on_settle", never)
    monkeypatch.setattr(pair.runner.own, "forward", fails)  # pyright: ignore
    with ThreadPoolExecutor() as pool:
        try:
            waiting = pool.submit(pair.weight_sync.stage, changed(str(folder)))
            assert asked.wait(10)
            pair.add_request([1, 2, 3], SamplingParams())
            ending = pool.submit(pair.shutdown if how == "shut down" else pair.step)
            with pytest.raises(
                WeightUpdateError, match="did not reach every rank: the engine has ended"
            ):
                waiting.result(12)
            with suppress(EngineDead):
                ending.result(12)
        finally:
            let_go.set()


def test_update_cancelled_mid_bucket_leaves_no_state(
    pair: InferenceEngine, folder: Path, shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread cancels. The thread that forwards the bucket notices afterwards."""
    manager, sent = pair.weight_sync, pair.runner.shares
    assert isinstance(sent, SentUpdates)
    names: list[str] = []
    give = SentUpdates.give

    def give_and_cancel(self: SentUpdates, update: WeightUpdate, name: str, *rest: Any) -> None:
        names.append(name)
        if len(names) == 3:
            canceller = threading.Thread(target=manager.cancel)
            canceller.start()
            canceller.join(10)
        give(self, update, name, *rest)

    monkeypatch.setattr(SentUpdates, "give", give_and_cancel)
    before = pair.weights_checksum()
    manager.begin()
    with pytest.raises(WeightUpdateError, match="cancelled"):
        manager.receive(changed(str(folder)))
    assert len(names) >= 3
    assert pair.weights_checksum() == before  # and all earlier commands have run
    assert not shards[0].updates._staged
    assert not sent._numbers


class OfAPool(torch.OutOfMemoryError):
    """Memory that a pool lacks, under another name than torch's error."""


@pytest.mark.parametrize("full", [torch.OutOfMemoryError, OfAPool])
def test_rank_without_memory_to_wake_stays_asleep(
    pair: InferenceEngine, monkeypatch: pytest.MonkeyPatch, full: type[Exception]
) -> None:
    """Like an engine of one rank: the card may have free memory again shortly."""
    quiet = pair.generate([[5, 6, 7]], SamplingParams(max_tokens=4, seed=3))[0]
    pair.sleep(weights=True)

    def fails(_: Sleep) -> None:
        raise full("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Sleep, "_take_memory", fails)
        with pytest.raises(
            LacksMemoryToWake, match=r"not enough memory to wake \w+.*rank 1.*CUDA out of memory"
        ):
            pair.wake()
    assert pair.sleeping() == ("weights", "kv_cache")
    pair.wake()
    assert (
        pair.generate([[5, 6, 7]], SamplingParams(max_tokens=4, seed=3))[0].logprobs
        == quiet.logprobs
    )


def test_rank_lost_before_monitoring_ends_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank lost right after construction is detected without a step."""
    watch = RankedRunner.watch

    def late(self: RankedRunner, *arguments: Any) -> None:
        (worker,) = self.worker_group.workers
        worker.link.close()
        with self.worker_group._changed:
            assert self.worker_group._changed.wait_for(
                lambda: self.worker_group.lost is not None, 10
            )
        watch(self, *arguments)

    monkeypatch.setattr(RankedRunner, "watch", late)
    with (
        InferenceEngine(config_of(folder), ThreadLauncher()) as engine,
        pytest.raises(EngineDead, match="rank 1"),
    ):
        engine.shared.require_alive()


def test_session_is_closed_if_one_rank_rejects_it(
    pair: InferenceEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover every reason for the rejection."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("unforeseen")

    new = changed(str(folder))
    with monkeypatch.context() as patched:
        patched.setattr(Shard, "_on_settle", fails)
        update = pair.weight_sync.begin()
        pair.weight_sync.receive(new)
        with pytest.raises(
            WeightUpdateError, match=r"not every rank can take the update: rank 1.*unforeseen"
        ):
            pair.weight_sync.end()
    assert update.done()
    assert pair.update_weights(new, blocking=True).version == 1


def test_unreachable_ranks_do_not_delay_shutdown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of torchrun cannot be checked: a closed link must be enough."""
    monkeypatch.setattr(worker_group, "STOP_PATIENCE", 30.0)
    monkeypatch.setattr(ThreadHandle, "alive", lambda _: True)
    engine = InferenceEngine(config_of(folder), ThreadLauncher())
    began = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - began < 15
