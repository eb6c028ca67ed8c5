"""Memory that keeps its addresses in a sleep: tensors, failures, and captured graphs."""

import logging
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_inference import (
    EngineDead,
    InferenceEngine,
    LacksMemoryToWake,
    NanoInferenceError,
    TrainingSample,
)
from nano_inference.device import pools
from nano_inference.device.driver import CudaDriver, DriverError, NoVirtualMemory
from nano_inference.device.pools import CardFull, Pool, pools_of
from nano_inference.types import Memory
from tests.depth import at_depth
from tests.device.cuda_cases import conventional
from tests.device.test_cuda_runner import bare, params, queue, runner
from tests.device.test_triton_graphs import num_graphs, start
from tests.device.virtual_card import (
    CPU,
    GRANULE,
    ILLEGAL_ADDRESS,
    OUT_OF_MEMORY,
    TOTAL,
    VirtualCard,
    card,
    library,
)
from tests.weights.weight_cases import NEW, Build, drain

__all__ = ["card", "conventional", "library"]

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
shapes = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=3), min_size=1, max_size=6)


# -- a pool ----------------------------------------------------------------------------------------


@pytest.mark.thorough
@settings(
    max_examples=at_depth(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(shapes=shapes, data=st.data())
def test_pool_keeps_addresses_and_bits(
    card: VirtualCard, shapes: list[list[int]], data: st.DataObject
) -> None:
    pool = Pool(card.driver(), CPU)
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    tensors = [pool.take(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    tensor = tensors[0]
    for index, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + index)
        assert pool.holds(tensor)
        assert tensor.data_ptr() % 16 == 0
    assert not pool.holds(torch.ones(1))
    expected, addresses = [t.clone() for t in tensors], [t.data_ptr() for t in tensors]
    assert card.used == pool.size <= sum(t.nbytes + 512 for t in tensors) + GRANULE
    for _ in range(2):
        pool.save()
        pool.release()
        assert card.used == 0
        pool.regain()
        pool.restore()
        assert card.used == pool.size
        for tensor, before, address in zip(tensors, expected, addresses, strict=True):
            assert torch.equal(tensor, before)
            assert tensor.data_ptr() == address
    del pool, tensors, tensor
    assert card.kept == (0, 0, 0)


def test_memory_lives_as_long_as_a_tensor(card: VirtualCard) -> None:
    pool = Pool(card.driver(), CPU)
    tensor, other = pool.take((5,), torch.float32), pool.take((3,), torch.int64)
    tensor.fill_(2.0)
    del pool, other
    assert card.kept[0] == GRANULE
    assert tensor.view(5, 1)[2:].sum() == 6.0
    del tensor
    assert card.kept == (0, 0, 0)


READ_ASLEEP = """
import torch
from nano_inference.device.driver import CudaDriver
from nano_inference.device.pools import Pool
pool = Pool(CudaDriver(0, {path!r}), torch.device("cpu"))
tensor = pool.take((4,), torch.int64).fill_(7)
pool.release()
print("released", flush=True)
tensor.sum()
"""


@pytest.mark.slow
def test_released_memory_cannot_be_read(card: VirtualCard) -> None:
    command = [sys.executable, "-c", READ_ASLEEP.format(path=card.path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "released\n", result.stderr
    assert result.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, ILLEGAL_ADDRESS])
def test_failed_allocation_leaves_a_pool_as_it_was(card: VirtualCard, code: int) -> None:
    """Every call of an allocation of several pieces fails once."""
    pool = Pool(card.driver(), CPU)
    kept = pool.take((100,), torch.float32).fill_(3.0)
    before, calls = card.used, card.calls
    pool.take((5 * GRANULE,), torch.uint8)
    calls, before = card.calls - calls, card.used
    assert calls >= 6
    for left in range(calls):
        card.fail(left, code)
        with pytest.raises(CardFull if code == OUT_OF_MEMORY else DriverError):
            pool.take((5 * GRANULE,), torch.uint8)
        card.succeed()
        assert card.used == pool.size == before
    assert kept.sum() == 300.0
    assert pool.take((5 * GRANULE,), torch.uint8).fill_(1).sum() == 5 * GRANULE


def test_full_card_names_what_is_missing(card: VirtualCard) -> None:
    pool = Pool(card.driver(), CPU)
    tensor = pool.take((4 * GRANULE,), torch.uint8).fill_(9)
    pool.save()
    pool.release()
    card.share(TOTAL - 3 * GRANULE)
    with pytest.raises(
        CardFull, match=f"{GRANULE:,} bytes of the card's memory are missing"
    ) as problem:
        pool.regain()
    assert problem.value.missing == GRANULE
    assert card.used == 0
    card.share(0)
    pool.regain()
    pool.restore()
    assert tensor.eq(9).all()


def test_full_host_saves_nothing(card: VirtualCard) -> None:
    pool = Pool(card.driver(), CPU)
    tensor = pool.take((4 * GRANULE,), torch.uint8).fill_(9)
    card.limit_host(3 * GRANULE)
    with pytest.raises(OSError, match="cannot pin"):
        pool.save()
    assert card.pinned == 0
    assert tensor.eq(9).all()


def test_unusable_driver_is_named(card: VirtualCard, tmp_path: Path) -> None:
    with pytest.raises(NoVirtualMemory, match="cannot be loaded"):
        CudaDriver(0, str(tmp_path / "nothing.so"))
    with pytest.raises(NoVirtualMemory, match="too old: it lacks cuInit"):
        CudaDriver(0, "libc.so.6")
    card.share(0, supported=False)
    with pytest.raises(NoVirtualMemory, match="no virtual memory management"):
        card.driver()


# -- engines ---------------------------------------------------------------------------------------


def addresses(engine: InferenceEngine) -> list[int]:
    tensors = [*engine.model.params.values(), *engine.runner.storage.tensors]
    return [tensor.data_ptr() for tensor in tensors]


def undisturbed(build: Build, **options: Any) -> list[str]:
    """Return the samples of an engine that never sleeps, whose memory is torch's."""
    engine = build(backend="reference", lookahead=1, **options)
    start(engine)
    return shown(drain(engine))


def shown(samples: list[TrainingSample]) -> list[str]:
    return [repr(replace(bare(sample), request_id=0, group_id=0)) for sample in samples]


def pool_of(engine: InferenceEngine, memory: Memory) -> Pool:
    held = runner(engine).pools
    assert held is not None
    return held[memory]


@pytest.mark.thorough(but=["None-memory2", "int8-memory0"])
@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize("memory", [["weights"], ["kv_cache"], ["weights", "kv_cache"]])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_sleep_keeps_addresses_graphs_and_bits(
    build: Build, card: VirtualCard, memory: list[Memory], quantization: Any
) -> None:
    expected = undisturbed(build, quantization=quantization)
    engine = build(backend="cuda", lookahead=1, quantization=quantization)
    start(engine)
    before, awake = addresses(engine), card.used
    assert awake == pool_of(engine, "weights").size + pool_of(engine, "kv_cache").size
    for _ in range(2):
        captures = queue(engine).num_captures
        engine.sleep(memory=memory)
        assert awake - card.used == sum(pool_of(engine, part).size for part in memory)
        engine.wake()
        assert card.used == awake
        assert addresses(engine) == before
        assert queue(engine).num_captures == captures
        engine.step()
    assert shown(drain(engine)) == expected
    assert queue(engine).num_captures == num_graphs(engine), "a graph was captured again"
    engine.shutdown()
    assert card.kept == (0, 0, 0)


@pytest.mark.usefixtures("conventional")
def test_weights_set_aside_sleep_outside_of_the_pool(build: Build, card: VirtualCard) -> None:
    results: list[list[str]] = []
    for backend in ("reference", "cuda"):
        engine = build(backend=backend, lookahead=1, ref_model_path=str(build().config.model_path))
        start(engine)
        engine.update_weights(NEW, kv_policy="finish_old")
        engine.add_request([1, 2, 3], params(seed=9, max_tokens=24))
        for _ in range(3):
            engine.step()
        if backend == "cuda":
            captures = queue(engine).num_captures
            engine.sleep(weights=True)
            assert card.used == 0
            engine.wake()
            assert queue(engine).num_captures == captures
        results.append(shown(drain(engine)))
    assert results[0] == results[1]


@pytest.mark.usefixtures("conventional")
def test_wake_waits_for_memory_that_others_took(build: Build, card: VirtualCard) -> None:
    expected = undisturbed(build)
    engine = build(backend="cuda", lookahead=1)
    start(engine)
    weights, cache = (pool_of(engine, part).size for part in ("weights", "kv_cache"))
    engine.sleep(weights=True)
    for free, awake in ((weights - GRANULE, 0), (weights + cache - GRANULE, weights)):
        card.share(TOTAL - free)
        with pytest.raises(LacksMemoryToWake, match="call wake\\(\\) again") as problem:
            engine.wake()
        assert problem.value.missing == GRANULE
        assert f"{GRANULE:,} bytes" in str(problem.value)
        assert card.used == awake
        assert engine.step() == []
    card.share(0)
    engine.wake()
    assert shown(drain(engine)) == expected


@pytest.mark.usefixtures("conventional")
def test_host_without_memory_leaves_the_weights_awake(build: Build, card: VirtualCard) -> None:
    expected = undisturbed(build)
    engine = build(backend="cuda", lookahead=1)
    start(engine)
    card.limit_host(GRANULE)
    with pytest.raises(NanoInferenceError, match="cannot pin"):
        engine.sleep(weights=True)
    assert engine.sleeping() == ()
    assert card.pinned == 0
    assert shown(drain(engine)) == expected


@pytest.mark.thorough
@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, ILLEGAL_ADDRESS])
def test_failing_call_leaves_a_sleep_that_wakes_or_an_end(
    build: Build, card: VirtualCard, code: int
) -> None:
    """Each call of the driver in a sleep and a wake fails once."""
    expected = undisturbed(build)
    engine, left, outcomes = build(backend="cuda", lookahead=1), 0, set[str]()
    while True:
        start(engine)
        calls = card.calls
        card.fail(left, code)
        outcome = slept(engine)
        if card.calls - calls <= left:
            break
        card.succeed()
        outcomes.add(outcome)
        left += 1
        if outcome == "dead":
            with pytest.raises(EngineDead, match="CUDA driver error"):
                engine.generate([[1]], params())
            engine.shutdown()
            assert card.kept == (0, 0, 0)
            engine = build(backend="cuda", lookahead=1)
        else:
            assert card.used == awake_bytes(engine)
            engine.wake()
            assert shown(drain(engine)) == expected
            pool_of(engine, "weights").forget()  # the next sleep pins memory again
    assert left > 20
    may_wake = set() if code == ILLEGAL_ADDRESS else {"awake", "asleep"}
    assert outcomes == {"dead"} | may_wake


def awake_bytes(engine: InferenceEngine) -> int:
    parts: tuple[Memory, ...] = ("weights", "kv_cache")
    return sum(pool_of(engine, part).size for part in parts if part not in engine.sleeping())


def slept(engine: InferenceEngine) -> str:
    """Let an engine sleep and wake. Return the state that a failure leaves it in."""
    try:
        sleep_and_wake(engine)
    except EngineDead:
        return "dead"
    except NanoInferenceError:
        return "asleep" if engine.sleeping() else "awake"
    return "whole"


@pytest.mark.thorough(but=["unmap", "map"])
@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize("call", ["queue_out", "unmap", "map", "queue_in"])
def test_interrupted_sleep_ends_the_engine(
    build: Build, card: VirtualCard, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A second Ctrl-C leaves some pieces of memory mapped, and others not."""
    engine, real, calls = build(backend="cuda", lookahead=1), getattr(CudaDriver, call), 0

    def interrupted(driver: CudaDriver, *arguments: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        real(driver, *arguments)

    start(engine)
    monkeypatch.setattr(CudaDriver, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        sleep_and_wake(engine)
    with pytest.raises(EngineDead, match="interrupted"):
        engine.generate([[1]], params())
    engine.shutdown()
    assert card.kept == (0, 0, 0)


def sleep_and_wake(engine: InferenceEngine) -> None:
    engine.sleep(weights=True)
    engine.wake()


@pytest.mark.usefixtures("conventional")
def test_start_names_how_memory_sleeps(
    build: Build,
    card: VirtualCard,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def too_old(device: torch.device) -> Any:
        raise NoVirtualMemory("the CUDA driver is too old: it lacks cuMemCreate")

    expected = undisturbed(build)
    with caplog.at_level(logging.INFO, "nano_inference"):
        build(backend="cuda")
        assert "sleep: addresses and graphs are kept" in caplog.text
        monkeypatch.setattr(pools, "pools_of", too_old)
        engine = build(backend="cuda", lookahead=1)
    assert "wake captures graphs again (the CUDA driver is too old: it lacks cuMem" in caplog.text
    assert runner(engine).pools is None
    start(engine)
    engine.sleep(weights=True)
    engine.wake()
    assert shown(drain(engine)) == expected


def test_cpu_has_no_pools() -> None:
    assert pools_of(CPU) is None
