"""Engines with separate requests and shared experts, as threads of one process."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.core.loop import EngineLoop
from nano_inference.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    NanoInferenceError,
    RankLost,
    WeightUpdateError,
)
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.ranks import lockstep as lockstep_module
from nano_inference.ranks.lockstep import Lockstep, LockstepGate, StoreBell
from nano_inference.rl import differences, replay
from tests.models.tiny import FAMILIES, family_weights, llama_config, tiny_model
from tests.parallel.thread_group import ThreadGroup
from tests.standing import slowed

FAMILY: dict[str, Any] = {"num_hidden_layers": 2, "sliding_window": None}
CONFIG = llama_config() | FAMILIES["mixtral"] | FAMILY
PARAMS = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seed=5)
PROMPTS = [list(range(3, 3 + length)) for length in (1, 20, 7, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("mixtral"), "mixtral", **FAMILY)


def config_of(folder: Path, **options: Any) -> EngineConfig:
    common: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_memory": 2**20,
        "backend": "reference",
    }
    return EngineConfig(model_path=str(folder), **(common | options))


@pytest.fixture(autouse=True)
def _long_requests_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineLoop, "step", slowed(EngineLoop.step, 150))


class Engines:
    """Engines in lockstep. A thread steps each engine while it has work."""

    def __init__(self, folder: Path, members: list[Lockstep], **options: Any) -> None:
        count = len(members)
        config = config_of(folder, expert_parallel=count, **options)
        self.each = [InferenceEngine(config, lockstep=member) for member in members]
        self.samples: list[list[TrainingSample]] = [[] for _ in self.each]
        self.dead: list[EngineDead | None] = [None] * count
        self._stop = False
        self._threads = [
            threading.Thread(target=self._step_on, args=(place,)) for place in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _step_on(self, index: int) -> None:
        engine = self.each[index]
        try:
            while not self._stop:
                engine.shared.work_arrived.wait(0.05)
                engine.shared.work_arrived.clear()
                engine.shared.require_alive()
                while engine.has_pending() and not self._stop:
                    self.samples[index] += engine.step()
        except EngineDead as problem:
            self.dead[index] = problem

    def wait_until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < end, "it did not come"
            time.sleep(0.002)

    def rest(self) -> None:
        """Wait until every engine is idle and reports the end of the wave."""
        self.wait_until(lambda: not any(engine.has_pending() for engine in self.each))
        waves = {(engine.loop.gate.running, engine.loop.gate.wave) for engine in self.each}  # pyright: ignore
        assert len(waves) == 1
        assert not next(iter(waves))[0]

    def rounds(self) -> list[int]:
        return [engine.loop.gate.num_rounds for engine in self.each]  # pyright: ignore

    def close(self) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()
        for engine in self.each:
            engine.shutdown()


class ThreadBell(StoreBell):
    """A bell for engines of one process, without a store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wave: float = -1
        self._listeners: list[Callable[[], None]] = []

    def ring(self, wave: float) -> None:
        self._hear(wave)
        for wake in list(self._listeners):
            wake()

    def listen(self, wake: Callable[[], None]) -> None:
        self._listeners.append(wake)

    def close(self) -> None:
        self.ring(math.inf)


def of_threads(count: int) -> list[Lockstep]:
    bell = ThreadBell()
    return [Lockstep(group, bell) for group in ThreadGroup.make(count, 20.0)]


def of_processes(count: int) -> list[Lockstep]:
    """Build links as between processes: gloo groups, and a bell in a store with one connection per
    engine.
    """
    dist: Any = torch.distributed
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    stores += [
        dist.TCPStore("127.0.0.1", stores[0].port, is_master=False) for _ in range(count - 1)
    ]
    bells = [StoreBell(dist.PrefixStore("bell", store)) for store in stores]

    def member(rank: int) -> Lockstep:
        group = ProcessGroup.meet(
            dist.PrefixStore("group", stores[rank]), rank, count, torch.device("cpu"), 20.0
        )
        return Lockstep(group, bells[rank])

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(member, range(count)))


@contextmanager
def lockstep(
    folder: Path, count: int = 2, make: Callable[[int], list[Lockstep]] = of_threads, **options: Any
) -> Iterator[Engines]:
    engines = Engines(folder, make(count), **options)
    try:
        yield engines
    finally:
        engines.close()


def bits(samples: list[TrainingSample]) -> list[object]:
    return [
        (s.prompt_tokens, s.completion_tokens, s.logprobs, s.weight_version, s.finish_reason)
        for s in samples
    ]


def alone(
    folder: Path, prompts: list[list[int]], weights: dict[str, Tensor] | None = None, **options: Any
) -> list[object]:
    with InferenceEngine(config_of(folder, **options)) as engine:
        if weights is not None:
            engine.update_weights(weights, blocking=True)
        return bits(engine.generate(prompts, PARAMS))


def in_order(samples: list[TrainingSample]) -> list[TrainingSample]:
    return sorted(samples, key=lambda sample: sample.request_id)


CHUNKS = {"backend": "cpu", "dtype": "bfloat16", "max_chunk_tokens": 7, "lookahead": 1}


@pytest.mark.thorough(but=["2-of_threads-options0"])
@pytest.mark.parametrize(
    ("count", "make", "options"),
    [(2, of_threads, {}), (3, of_threads, CHUNKS), (2, of_processes, {})],
)
def test_lockstep_serves_one_engine_then_both_then_none(
    folder: Path, count: int, make: Callable[[int], list[Lockstep]], options: dict[str, Any]
) -> None:
    expected = alone(folder, PROMPTS, **options)
    with lockstep(folder, count, make, **options) as engines:
        first, last = engines.each[0], engines.each[-1]
        held = [engine.model.part.experts for engine in engines.each]
        assert [each.start for each in held] == [0, *(each.stop for each in held[:-1])]
        for prompt in PROMPTS:
            first.add_request(prompt, PARAMS)
        engines.wait_until(lambda: len(engines.samples[0]) == len(PROMPTS))
        engines.rest()
        assert bits(in_order(engines.samples[0])) == expected
        assert last.runner.tokens_computed == 0
        quiet = engines.rounds()
        assert len(set(quiet)) == 1

        for samples in engines.samples:
            samples.clear()
        for prompt in PROMPTS[:3]:
            first.add_request(prompt, PARAMS)
        for prompt in reversed(PROMPTS):
            last.add_request(prompt, PARAMS)
        engines.wait_until(
            lambda: len(engines.samples[0]) == 3 and len(engines.samples[-1]) == len(PROMPTS)
        )
        engines.rest()
        assert bits(in_order(engines.samples[0])) == expected[:3]
        assert bits(in_order(engines.samples[-1])) == expected[::-1]
        busy = engines.rounds()
        time.sleep(0.2)
        assert engines.rounds() == busy, "they do not rest"
        assert busy[0] > quiet[0]


def test_updates_are_live_in_the_same_round_everywhere(folder: Path) -> None:
    """One engine receives the update long before the other. Both continue on the old weights until
    both have it.
    """
    weights = family_weights(CONFIG, seed=3)
    before, after = alone(folder, PROMPTS), alone(folder, PROMPTS, weights)
    with lockstep(folder) as engines:
        one, other = engines.each
        early = one.update_weights(weights)
        engines.rest()
        assert not early.done()
        for prompt in PROMPTS:
            one.add_request(prompt, PARAMS)
        engines.wait_until(lambda: len(engines.samples[0]) == len(PROMPTS))
        engines.rest()
        assert bits(in_order(engines.samples[0])) == before
        engines.samples[0].clear()
        assert other.update_weights(weights, blocking=True).version == 1
        assert early.wait(20)
        assert [engine.get_weight_version() for engine in engines.each] == [1, 1]
        for prompt in PROMPTS:
            other.add_request(prompt, PARAMS)
        engines.wait_until(lambda: len(engines.samples[1]) == len(PROMPTS))
        assert bits(in_order(engines.samples[1])) == after
        engines.rest()


def test_engine_in_lockstep_rejects_a_folder_of_kept_blocks(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, kept_cache_folder=str(tmp_path / "kept"))
    with pytest.raises(ConfigError, match=r"kept_cache_folder=.* is not possible for engines in"):
        InferenceEngine(config, lockstep=of_threads(1)[0])
    assert not (tmp_path / "kept").exists()


@pytest.mark.thorough
def test_agreed_update_is_not_withdrawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One caller cancels the update while the engines are about to write it."""
    weights = family_weights(CONFIG, seed=3)
    in_time: list[bool] = []
    with lockstep(folder) as engines:
        one, other = engines.each
        early, member = one.update_weights(weights), one.loop.gate
        assert isinstance(member, LockstepGate)
        take_in = member._take_in
        threads: list[threading.Thread] = []

        def withdraw() -> None:
            in_time.append(one.weight_sync.withdraw(early, WeightUpdateError("it takes too long.")))

        def take_in_and_withdraw(*arguments: Any) -> list[str]:
            taken = take_in(*arguments)
            if member.allows(early.version) and not threads:
                threads.append(threading.Thread(target=withdraw))
                threads[0].start()
                threads[0].join(0.3)
            return taken

        monkeypatch.setattr(member, "_take_in", take_in_and_withdraw)
        assert other.update_weights(weights).result(10) == 1
        assert early.wait(20)
        one.add_request(PROMPTS[0], PARAMS)
        engines.wait_until(lambda: bool(engines.samples[0] or engines.dead[0]))
        threads[0].join()
        assert engines.dead == [None, None]
        assert in_time == [False]
        assert early.result(0) == 1
        gone = one.update_weights(weights)
        engines.rest()
        assert one.weight_sync.withdraw(gone, WeightUpdateError("nobody else has it."))
        assert other.update_weights(weights).version == 2


@pytest.mark.thorough
def test_update_is_simultaneous_on_all_engines(folder: Path) -> None:
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with lockstep(folder) as engines:
        for engine in engines.each:
            engine.add_request(PROMPTS[1], long)
        gone = engines.each[0].add_request(PROMPTS[2], long)
        updates = []
        for version in range(1, 4):
            new = family_weights(CONFIG, seed=version)
            updates.append(
                [engine.update_weights(new, kv_policy="keep") for engine in engines.each]
            )
            if version == 2:
                assert [sample.finish_reason for sample in engines.each[0].abort(gone)] == ["abort"]
        engines.wait_until(lambda: all(len(samples) == 1 for samples in engines.samples))
        engines.rest()
        assert all(update.done() for pair in updates for update in pair)
        assert [samples[0].weight_version for samples in engines.samples] == [3, 3]
        assert [engine.get_weight_version() for engine in engines.each] == [3, 3]
        with pytest.raises(InvalidRequest, match="replay on an engine with one rank"):
            replay(engines.each[0], engines.samples[0][0])
    versions = {
        0: folder,
        **{version: family_weights(CONFIG, seed=version) for version in range(1, 4)},
    }
    with InferenceEngine(config_of(folder)) as engine:
        for samples in engines.samples:
            assert differences(samples[0], replay(engine, samples[0], weights=versions)) == ()


def test_paused_engine_still_serves_its_peers(folder: Path) -> None:
    with lockstep(folder) as engines:
        one, other = engines.each
        one.pause()
        one.add_request(PROMPTS[0], PARAMS)
        other.add_request(PROMPTS[1], PARAMS)
        engines.wait_until(lambda: len(engines.samples[1]) == 1)
        engines.rest()
        assert not engines.samples[0]
        one.resume()
        engines.wait_until(lambda: len(engines.samples[0]) == 1)
        assert bits(engines.samples[0] + engines.samples[1]) == alone(folder, PROMPTS[:2])


def on_all(engines: Engines, call: Callable[[InferenceEngine], Any]) -> list[Any]:
    """Return the results of a call made on all engines simultaneously."""
    with ThreadPoolExecutor(len(engines.each)) as pool:
        return list(pool.map(call, engines.each))


def sleep_with_weights(engine: InferenceEngine) -> str:
    try:
        engine.sleep(weights=True)
    except NanoInferenceError as problem:
        return str(problem)
    return ""


@pytest.mark.thorough
@pytest.mark.parametrize("make", [of_threads, of_processes])
def test_weights_sleep_together_during_requests(
    folder: Path, make: Callable[[int], list[Lockstep]]
) -> None:
    """Offload weights while both engines compute, update them while the KV cache sleeps, then
    continue.
    """
    weights = family_weights(CONFIG, seed=3)
    long = replace(PARAMS, max_tokens=60)
    with InferenceEngine(config_of(folder)) as engine:
        before = bits(engine.generate(PROMPTS[:2], long))
        engine.update_weights(weights, blocking=True)
        after = bits(engine.generate(PROMPTS[:2], long))
    with lockstep(folder, make=make) as engines:
        for engine, prompt in zip(engines.each, PROMPTS, strict=False):
            engine.add_request(prompt, long)
        engines.wait_until(lambda: engines.rounds()[0] > 5)
        assert on_all(engines, sleep_with_weights) == ["", ""]
        assert [engine.sleeping() for engine in engines.each] == [("weights", "kv_cache")] * 2
        asleep = engines.rounds()
        assert asleep[0] == asleep[1]
        time.sleep(0.2)
        assert engines.rounds() == asleep
        on_all(engines, lambda engine: engine.wake())
        engines.wait_until(lambda: all(len(samples) == 1 for samples in engines.samples))
        assert bits(engines.samples[0] + engines.samples[1]) == before

        assert on_all(engines, sleep_with_weights) == ["", ""]
        on_all(engines, lambda engine: engine.wake(memory=["weights"]))
        updates = [engine.update_weights(weights) for engine in engines.each]
        assert [update.result(20) for update in updates] == [1, 1]
        assert all(engine.is_paused() for engine in engines.each)
        on_all(engines, lambda engine: engine.wake())
        for engine, prompt, samples in zip(engines.each, PROMPTS, engines.samples, strict=False):
            samples.clear()
            engine.add_request(prompt, long)
        engines.wait_until(lambda: all(len(samples) == 1 for samples in engines.samples))
        assert bits(engines.samples[0] + engines.samples[1]) == after
        engines.rest()


@pytest.mark.thorough
def test_weights_stay_if_a_peer_needs_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine is asked to sleep, then to wake, without its peer. Each waits for the peer with a
    timeout.
    """

    def limit(seconds: float) -> None:
        monkeypatch.setattr(lockstep_module, "SLEEP_SECONDS", seconds)
        monkeypatch.setattr(lockstep_module, "WAKE_SECONDS", seconds)

    limit(0.3)
    with lockstep(folder) as engines:
        one, other = engines.each
        other.add_request(PROMPTS[1], replace(PARAMS, max_tokens=150))
        other.add_request(PROMPTS[0], PARAMS)
        assert "not all engines were asked to sleep within 0.3 s" in sleep_with_weights(one)
        assert (one.sleeping(), one.is_paused()) == ((), False)
        one.add_request(PROMPTS[1], PARAMS)
        engines.wait_until(lambda: [len(samples) for samples in engines.samples] == [1, 2])
        assert [*bits(engines.samples[0]), *bits(engines.samples[1][:1])] == alone(
            folder, [PROMPTS[1], PROMPTS[0]]
        )
        limit(20.0)
        assert on_all(engines, sleep_with_weights) == ["", ""]
        one.add_request(PROMPTS[0], PARAMS)
        limit(0.3)
        with pytest.raises(NanoInferenceError, match="other engines in lockstep are still asleep"):
            one.wake()
        assert (one.sleeping(), one.is_paused()) == ((), True)
        limit(20.0)
        assert "not all" not in sleep_with_weights(one)  # again: the peer is still asleep
        on_all(engines, lambda engine: engine.wake())
        engines.wait_until(lambda: len(engines.samples[0]) == 2)
        assert bits(engines.samples[0][1:]) == alone(folder, PROMPTS[:1])
        assert not any(engine.is_paused() for engine in engines.each)


def test_failed_offload_on_one_engine_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others sleep and wait for it. Waking all undoes the sleep."""
    with lockstep(folder) as engines:
        one, _ = engines.each

        def fails(_: str) -> Any:
            raise OSError("no space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(one.runner, "give_back", fails)
            first, second = on_all(engines, sleep_with_weights)
        assert ("no space left" in first, second) == (True, "")
        assert (one.sleeping(), one.is_paused()) == ((), True)
        one.add_request(PROMPTS[0], PARAMS)
        one.resume()  # fails: the peer's experts are asleep
        on_all(engines, lambda engine: engine.wake())
        engines.wait_until(lambda: len(engines.samples[0]) == 1)
        assert bits(engines.samples[0]) == alone(folder, PROMPTS[:1])


def test_lost_engine_during_a_sleep_ends_all(folder: Path) -> None:
    with lockstep(folder) as engines:
        assert on_all(engines, sleep_with_weights) == ["", ""]
        engines.each[1].shutdown()
        engines.wait_until(lambda: engines.dead[0] is not None)
        with pytest.raises(EngineDead):
            engines.each[0].wake()


@pytest.mark.parametrize("make", [of_threads, of_processes])
def test_lost_engine_ends_all(folder: Path, make: Callable[[int], list[Lockstep]]) -> None:
    with lockstep(folder, make=make) as engines:
        engines.each[0].add_request(PROMPTS[1], SamplingParams(max_tokens=400, ignore_eos=True))
        engines.wait_until(lambda: engines.rounds()[0] > 3)
        engines.each[1].shutdown()
        engines.wait_until(lambda: engines.dead[0] is not None)
        message = (
            "rank 1 has left" if make is of_threads else "rank 0 of a group of 2 waited for another"
        )
        assert message in str(engines.dead[0])
        with pytest.raises(EngineDead, match=message):
            engines.each[0].add_request(PROMPTS[0], PARAMS)


def test_lost_store_counts_as_a_lost_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cover a loss before and during its detection by the listening thread."""
    dist: Any = torch.distributed
    bell = StoreBell(dist.HashStore())

    def gone(*_: Any) -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(bell, "_store", SimpleNamespace(set=gone))
    with pytest.raises(RankLost, match="the store of the engines in lockstep is gone"):
        bell.ring(0)
    bell._wave = math.inf  # by the other thread, just now
    bell.close()


def test_lockstep_rejects_unsupported_options(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 engines in lockstep, which are started together"):
        InferenceEngine(config_of(folder, expert_parallel=2))
    with pytest.raises(ConfigError, match="which has no experts"):
        InferenceEngine(config_of(tiny_model(tmp_path, "llama"), expert_parallel=2))
    crowd = Lockstep(ThreadGroup.make(5)[0], ThreadBell())
    with pytest.raises(ConfigError, match="exceed the model's 4 experts"):
        InferenceEngine(config_of(folder, expert_parallel=5), lockstep=crowd)
    with lockstep(folder) as engines:
        engine = engines.each[0]
        with pytest.raises(WeightUpdateError, match="finish_old"):
            engine.update_weights({"model.norm.weight": torch.ones(64)}, kv_policy="finish_old")
        with pytest.raises(InvalidRequest, match="not possible for engines in lockstep"):
            engine.shared.between_steps("policy", lambda: None)
