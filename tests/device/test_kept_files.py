"""Offloaded conversations are restored from memory and files bit for bit, without delaying
requests.
"""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.device import kept_files
from nano_inference.errors import AdapterError, ConfigError, InvalidRequest
from tests.models.tiny import tiny_model

Build = Callable[..., InferenceEngine]
SIZE = 4
KINDS = [("llama", "paged"), ("llama", "radix"), ("gemma3", "paged"), ("gemma3", "radix")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {f: tiny_model(tmp_path_factory.mktemp(f), f) for f in ("llama", "gemma3")}


@pytest.fixture
def build(models: dict[str, Path]) -> Iterator[Build]:
    built: list[InferenceEngine] = []
    threads = torch.get_num_threads()

    def make(family: str = "llama", **options: Any) -> InferenceEngine:
        defaults = {
            "block_size": SIZE,
            "device": "cpu",
            "num_threads": 1,
            "kv_cache_memory": 2**15,
            "backend": "reference",
        }
        built.append(
            InferenceEngine(EngineConfig(model_path=str(models[family]), **(defaults | options)))
        )
        return built[-1]

    yield make
    for engine in built:
        engine.shutdown()
    torch.set_num_threads(threads)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=5, ignore_eos=True, seed=3, **options)


def prompt_of(length: int, stem: int = 0) -> list[int]:
    return [(11 * place + 17 * stem) % 290 + 3 for place in range(length)]


def bits(sample: TrainingSample) -> tuple[Any, ...]:
    return sample.completion_tokens, sample.logprobs


def turn(engine: InferenceEngine, sample: TrainingSample) -> list[int]:
    """Continue the conversation with a tool's output."""
    return [*sample.prompt_tokens, *sample.completion_tokens, 9, 8, 7]


def press(engine: InferenceEngine) -> None:
    """Fill every block with other requests."""
    length = engine.cache.num_blocks * SIZE - 5
    length = min(length, engine.max_model_len - 5)
    count = -(-engine.cache.num_blocks * SIZE // length) + 1
    for stem in range(count):
        engine.generate([prompt_of(length, stem + 1)], params())
        engine.loop.check()


@pytest.mark.thorough(cases=["gemma3-paged", "gemma3-radix"])
@pytest.mark.parametrize(("family", "cache_type"), KINDS)
def test_conversation_is_restored_from_memory_bit_for_bit(
    build: Build, family: str, cache_type: str
) -> None:
    engine, alone = build(family, cache_type=cache_type), build(family, cache_type=cache_type)
    kept = engine.generate([prompt_of(20)], params(keep_cache_seconds=60.0))[0]
    other = engine.generate([prompt_of(20, 5)], params())[0]
    assert engine.stats().num_kept_blocks == 6
    for stem in range(8, 40):
        engine.generate([prompt_of(20, stem)], params())
    engine.loop.check()
    again = engine.generate([turn(engine, kept)], params())[0]
    assert again.cached_tokens == 24
    assert engine.generate([turn(engine, other)], params())[0].cached_tokens == 0
    assert bits(again) == bits(alone.generate([turn(engine, kept)], params())[0])


@pytest.mark.parametrize(("family", "cache_type"), KINDS)
def test_conversation_is_restored_from_files_bit_for_bit(
    build: Build, tmp_path: Path, family: str, cache_type: str
) -> None:
    engine = build(family, cache_type=cache_type, kept_cache_folder=str(tmp_path))
    alone = build(family, cache_type=cache_type)
    kept = engine.generate([prompt_of(20)], params(keep_cache_seconds=60.0, cache_priority=2))[0]
    press(engine)
    stats = engine.stats()
    assert stats.num_kept_blocks == 0, "running requests took what was kept"
    assert stats.kept_blocks_written == 6
    assert stats.kept_file_bytes > 0
    again = engine.generate([turn(engine, kept)], params())[0]
    engine.loop.check()
    assert again.cached_tokens == 24
    assert bits(again) == bits(alone.generate([turn(engine, kept)], params())[0])
    stats = engine.stats()
    assert (stats.kept_blocks_read, stats.kept_file_bytes, stats.num_kept_blocks) == (6, 0, 6)
    assert {mark.priority for mark in engine.cache.kept.marks.values()} == {2}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("lock")]


def test_files_are_private_and_removed_at_shutdown(build: Build, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    engine = build(kept_cache_folder=str(folder))
    engine.generate([prompt_of(20)], params(keep_cache_seconds=60.0))
    press(engine)
    (engine_folder,) = [path for path in folder.iterdir() if path.is_dir()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, engine_folder)] == [0o700, 0o700]
    assert len(files(folder)) == 6
    assert sum(path.stat().st_size for path in files(folder)) == engine.stats().kept_file_bytes
    engine.shutdown()
    assert not files(folder)
    assert not engine_folder.exists()


def test_files_are_removed_when_they_expire(build: Build, tmp_path: Path) -> None:
    engine = build(kept_cache_folder=str(tmp_path))
    assert engine.kept_files is not None
    now = 100.0
    engine.cache.kept.clock = lambda: now
    kept = engine.generate([prompt_of(20)], params(keep_cache_seconds=60.0))[0]
    press(engine)
    now = 159.0
    engine.kept_files.sweep()
    assert len(files(tmp_path)) == 6
    now = 160.0
    assert engine.generate([turn(engine, kept)], params())[0].cached_tokens == 0
    engine.kept_files.sweep()
    assert not files(tmp_path)


@pytest.mark.parametrize("how", ["update", "flush"])
def test_update_and_flush_drop_offloaded_blocks(build: Build, tmp_path: Path, how: str) -> None:
    engine = build(kept_cache_folder=str(tmp_path))
    first = engine.generate([prompt_of(20)], params(keep_cache_seconds=60.0))[0]
    press(engine)
    engine.generate([prompt_of(12, 50)], params(keep_cache_seconds=60.0))
    assert files(tmp_path)
    assert engine.stats().num_kept_blocks
    if how == "update":
        engine.update_weights(
            {"model.norm.weight": engine.model.params["norm"] * 1.5}, blocking=True
        )
    else:
        engine.flush_cache()
    assert not files(tmp_path)
    assert not engine.stats().num_kept_blocks
    assert engine.generate([turn(engine, first)], params())[0].cached_tokens == 0
    engine.loop.check()


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "longer"])
def test_damaged_file_is_not_read(build: Build, tmp_path: Path, damage: str) -> None:
    engine, alone = build(kept_cache_folder=str(tmp_path)), build()
    kept = engine.generate([prompt_of(20)], params(keep_cache_seconds=60.0))[0]
    press(engine)
    for path in files(tmp_path):
        content = bytearray(path.read_bytes())
        if damage == "changed":
            content[-5] ^= 1
        elif damage == "cut":
            del content[-5:]
        elif damage == "longer":
            content += b"1"
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(content)
    again = engine.generate([turn(engine, kept)], params())[0]
    assert again.cached_tokens == 0
    assert bits(again) == bits(alone.generate([turn(engine, kept)], params())[0])


def test_files_are_bounded_and_the_oldest_removed(build: Build, tmp_path: Path) -> None:
    engine = build(kept_cache_folder=str(tmp_path))
    engine.generate([prompt_of(20)], params(keep_cache_seconds=60.0))
    press(engine)
    one = engine.stats().kept_file_bytes // 6
    engine.shutdown()
    engine = build(kept_cache_folder=str(tmp_path), kept_cache_bytes=3 * one)
    kept = engine.generate([prompt_of(20)], params(keep_cache_seconds=60.0))[0]
    press(engine)
    stats = engine.stats()
    assert (stats.kept_blocks_written, stats.kept_file_bytes) == (6, 3 * one)
    assert len(files(tmp_path)) == 3
    # the end of a chain is evicted first, and therefore is the oldest
    assert engine.generate([turn(engine, kept)], params())[0].cached_tokens == 12


def test_engines_sharing_a_folder_do_not_interfere(build: Build, tmp_path: Path) -> None:
    left = tmp_path / f"nano-kept-{'0f' * 16}"
    left.mkdir(mode=0o700)
    (left / "lock").touch()
    (left / "0f").write_bytes(b"half")
    one, two = (build(kept_cache_folder=str(tmp_path)) for _ in range(2))
    assert not left.exists()
    kept = one.generate([prompt_of(20)], params(keep_cache_seconds=60.0))[0]
    press(one)
    assert two.generate([turn(two, kept)], params())[0].cached_tokens == 0
    two.shutdown()
    assert one.generate([turn(one, kept)], params())[0].cached_tokens == 24


@pytest.mark.thorough
def test_group_is_offloaded_under_pressure_while_it_runs(build: Build, tmp_path: Path) -> None:
    """Keep conversations while concurrent requests exceed the memory."""
    engine, alone = build(kept_cache_folder=str(tmp_path)), build()
    prompts = [prompt_of(8 + 3 * n, n) for n in range(12)]
    keeping = [params(keep_cache_seconds=5.0 + n, cache_priority=n % 3) for n in range(12)]
    for _ in range(3):
        first = engine.generate(prompts, keeping, 2)
        engine.loop.check()
        expected = alone.generate(prompts, params(), 2)
        assert [*map(bits, first)] == [*map(bits, expected)]
        prompts = [turn(engine, sample) for sample in first[::2]]


@pytest.mark.parametrize("why", ["sequences", "memory"])
def test_files_are_read_only_for_admitted_requests(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A long conversation waits while others run. When they end, it is restored immediately."""
    limits: dict[str, Any] = {"max_batch_size": 2} if why == "sequences" else {}
    length = 20 if limits else 100
    engine = build(kept_cache_folder=str(tmp_path), kv_cache_memory=2**17, **limits)
    alone = build(kv_cache_memory=2**17)
    kept = engine.generate([prompt_of(length)], params(keep_cache_seconds=60.0))[0]
    press(engine)
    files, written = engine.kept_files, engine.stats().kept_blocks_written
    assert files is not None
    assert len(files) == written
    reads, read = list[int](), files._read  # pyright: ignore[reportPrivateUsage]

    def counted(name: int, token_ids: Any) -> Any:
        reads.append(name)
        return read(name, token_ids)

    monkeypatch.setattr(files, "_read", counted)
    busy = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    for stem in (3, 4):
        engine.add_request(prompt_of(20 if limits else 110, stem), busy)
    engine.step()
    engine.add_request(turn(engine, kept), params())
    while len(engine.loop.sequences.running) == 2:
        assert not reads
        assert engine.stats().kept_blocks_written == written
        engine.step()
    last: list[TrainingSample] = []
    while engine.has_pending():
        last += engine.step()
        engine.loop.check()
    (again,) = [each for each in last if len(each.completion_tokens) == 5]
    assert again.cached_tokens == 4 * written
    assert len(reads) == written, "what was read was evicted and read again"
    assert bits(again) == bits(alone.generate([turn(engine, kept)], params())[0])


@pytest.mark.thorough(cases=["paged"])
@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_conversations_beyond_memory_are_all_restored(
    build: Build, tmp_path: Path, cache_type: str
) -> None:
    engine = build(cache_type=cache_type, kept_cache_folder=str(tmp_path))
    alone = build(cache_type=cache_type)
    assert engine.cache.num_blocks < 20 * 6
    replies = [
        engine.generate([prompt_of(20, n)], params(keep_cache_seconds=60.0))[0] for n in range(20)
    ]
    for sample in replies:
        again = engine.generate([turn(engine, sample)], params(keep_cache_seconds=60.0))[0]
        engine.loop.check()
        assert again.cached_tokens == 24
        assert bits(again) == bits(alone.generate([turn(engine, sample)], params())[0])
    together = [turn(engine, sample) for sample in replies]
    samples = engine.generate(together, params())
    assert sum(sample.cached_tokens for sample in samples) > 20 * 20, "few come back together"


def test_failing_disk_ends_no_request(
    build: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, now = build(kept_cache_folder=str(tmp_path)), 100.0
    assert engine.kept_files is not None
    engine.cache.kept.clock = lambda: now
    kept = engine.generate([prompt_of(20)], params(keep_cache_seconds=600.0))[0]
    press(engine)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        for name in ("unlink", "write_bytes", "replace"):
            patch.setattr(Path, name, fail)
        with caplog.at_level(logging.WARNING):
            assert engine.generate([turn(engine, kept)], params())[0].cached_tokens == 24
            press(engine)
        assert len(caplog.records) == 1, "each block is one warning"
        engine.generate([prompt_of(20, 7)], params(keep_cache_seconds=600.0))
        engine.kept_files.forget(lambda _: True)
    written = engine.stats().kept_blocks_written
    now = 129.0
    press(engine)
    assert engine.stats().kept_blocks_written == written
    now = 130.0
    engine.generate([prompt_of(20)], params(keep_cache_seconds=600.0))
    press(engine)
    assert engine.stats().kept_blocks_written == written + 6


def test_foreign_files_are_neither_followed_nor_removed(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ["nano-kept-photos", "kept-photos", f"nano-kept-{'1e' * 16}"]
    for name in mine:
        (tmp_path / name).mkdir(mode=0o755)
        (tmp_path / name / "lock").touch()
    held = tmp_path / f"nano-kept-{'2e' * 16}"
    held.mkdir(mode=0o700)
    os.mkfifo(held / "lock")
    (tmp_path / f"nano-kept-{'3e' * 16}").symlink_to(tmp_path / "kept-photos")
    build(kept_cache_folder=str(tmp_path)).shutdown()
    assert all((tmp_path / name / "lock").exists() for name in mine)
    assert held.exists()
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="it is not a directory"):
        build(kept_cache_folder=str(link))
    lock = tmp_path / "nano-kept.lock"
    lock.unlink()
    lock.symlink_to(target)
    with pytest.raises(ConfigError, match="kept_cache_folder"):
        build(kept_cache_folder=str(tmp_path))
    assert not target.exists()
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(ConfigError, match="not a regular file"):
        build(kept_cache_folder=str(tmp_path))
    lock.unlink()
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match="other users own it or may write there"):
        build(kept_cache_folder=str(tmp_path))
    tmp_path.chmod(0o700)
    monkeypatch.setattr(kept_files, "_PATIENCE", 0.05)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process has held"):
            build(kept_cache_folder=str(tmp_path))
    build(kept_cache_folder=str(tmp_path))


def test_failed_construction_leaves_no_folder(build: Build, tmp_path: Path) -> None:
    with pytest.raises(AdapterError):
        build(kept_cache_folder=str(tmp_path), max_loras=1, loras=(f"own={tmp_path / 'missing'}",))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_unsupported_offload_options_are_rejected(build: Build, models: dict[str, Path]) -> None:
    for seconds in (None, -1.0, float("nan"), 86401.0, "5m"):
        with pytest.raises(InvalidRequest, match="keep_cache_seconds"):
            params(keep_cache_seconds=seconds)
    with pytest.raises(InvalidRequest, match="cache_priority=3 needs keep_cache_seconds"):
        params(cache_priority=3)
    with pytest.raises(InvalidRequest, match="cache_priority"):
        params(keep_cache_seconds=1.0, cache_priority=2**31)
    with pytest.raises(
        InvalidRequest,
        match="keep_cache_seconds=5 is not possible with enable_prefix_caching=False",
    ):
        build(enable_prefix_caching=False).generate([[5, 6]], params(keep_cache_seconds=5.0))
    path = str(models["llama"])
    with pytest.raises(ConfigError, match="kept_cache_bytes=5 needs kept_cache_folder"):
        EngineConfig(model_path=path, kept_cache_bytes=5)
    with pytest.raises(ConfigError, match="one rank"):
        EngineConfig(model_path=path, kept_cache_folder="/tmp", tensor_parallel=2)
    with pytest.raises(ConfigError, match="kept_cache_folder"):
        build(kept_cache_folder="/dev/null")


def test_prefetch_restores_blocks_before_the_request(build: Build, tmp_path: Path) -> None:
    engine = build(kept_cache_folder=str(tmp_path))
    prompt = prompt_of(24)
    (first,) = engine.generate(prompt, params(keep_cache_seconds=60))
    history = [*prompt, *first.completion_tokens]
    for stem in range(1, 12):  # evict all of it
        engine.generate(prompt_of(48, stem), params())
    assert engine.stats().kept_file_bytes > 0
    in_memory = engine.kept_prompts.prefetch(history)
    assert in_memory >= 24
    read = engine.stats().kept_blocks_read
    assert read > 0
    (again,) = engine.generate([*history, 5, 6], params())
    assert again.cached_tokens == in_memory
    assert engine.stats().kept_blocks_read == read
    (fresh,) = engine.generate([*history, 5, 6], params(cache_salt="other"))
    assert fresh.completion_tokens == again.completion_tokens
    assert fresh.logprobs == again.logprobs
    assert engine.kept_prompts.release(history) > 0
    assert engine.stats().num_kept_blocks == 0
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        engine.kept_prompts.prefetch([10**9])
