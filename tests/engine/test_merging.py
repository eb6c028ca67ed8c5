"""A merged adapter equals a model loaded from merged weights, and unmerging leaves no trace."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.arrays import as_torch
from nano_inference.checkpoints.lora import LoraSettings
from nano_inference.engine import adapters
from nano_inference.errors import (
    AdapterError,
    AdapterNotFound,
    InvalidRequest,
    WeightUpdateConflict,
    WeightUpdateError,
)
from nano_inference.rl import score
from tests.engine.test_adapters import matrices
from tests.models.tiny import tiny_llama

PROMPT = list(range(3, 40))
SETTINGS = LoraSettings(rank=4, alpha=8.0)
SCALE = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def adapter_of(folder: Path, seed: int) -> dict[str, Tensor]:
    return {name: t for name, t in matrices(folder, seed).items() if "lm_head" not in name}


@pytest.fixture(params=["cpu", "reference"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[InferenceEngine]:
    with make(folder, request.param) as engine:
        for seed, name in enumerate(("own", "other")):
            engine.load_adapter(name, adapter_of(folder, seed), SETTINGS)
        yield engine


def make(folder: Path, backend: Any = "cpu", **options: Any) -> InferenceEngine:
    fields: dict[str, Any] = {"max_loras": 2, "kv_cache_memory": 2**22, "device": "cpu"}
    return InferenceEngine(EngineConfig(str(folder), backend=backend, **(fields | options)))


def sample(engine: InferenceEngine, adapter: str | None = None) -> TrainingSample:
    params = SamplingParams(max_tokens=12, seed=1, adapter=adapter, ignore_eos=True)
    (result,) = engine.generate([PROMPT], params)
    return result


def bits(sample: TrainingSample) -> tuple[Any, ...]:
    return sample.completion_tokens, sample.logprobs


def merged_folder(folder: Path, target: Path, seed: int) -> Path:
    """Return a checkpoint with the adapter merged by independent code."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    tensors, pairs = load_file(folder / "model.safetensors"), adapter_of(folder, seed)
    for name in [name for name in pairs if "lora_A" in name]:
        a, b = pairs[name], pairs[name.replace("lora_A", "lora_B")]
        module = name.removeprefix("base_model.model.").replace(".lora_A", "")
        delta = torch.zeros(b.shape[0], a.shape[1])
        for rank in range(a.shape[0]):
            delta = delta + torch.outer(b[:, rank], a[rank])
        old = tensors[module]
        tensors[module] = (old.float() + SCALE * delta).to(old.dtype)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.thorough(cases=["cpu"])
def test_merge_equals_merged_weights_and_unmerge_restores(
    engine: InferenceEngine, folder: Path, tmp_path: Path
) -> None:
    before, beside, sums = sample(engine), sample(engine, "own"), engine.weights_checksum()
    assert engine.merge_adapter("own") == 1
    assert engine.get_weight_version() == 1
    merged = sample(engine)
    assert merged.cached_tokens == 0, "a block of the old weights matched"
    assert merged.weight_version == 1
    assert bits(sample(engine, "own")) == bits(merged)
    assert bits(merged) != bits(before)
    assert merged.logprobs[0] == pytest.approx(beside.logprobs[0], abs=0.1)
    backend = engine.config.backend
    with make(merged_folder(folder, tmp_path / "merged", 0), backend, max_loras=0) as other:
        assert other.weights_checksum() == engine.weights_checksum()
        assert bits(sample(other)) == bits(merged)
    assert engine.unmerge_adapter() == 2
    assert engine.weights_checksum() == sums
    assert bits(sample(engine)) == bits(before)
    assert bits(sample(engine, "own")) == bits(beside)


def test_merge_rejects_requests_for_a_second_adapter(engine: InferenceEngine) -> None:
    beside = sample(engine, "other")
    with pytest.raises(AdapterNotFound, match="'third' is not loaded"):
        engine.merge_adapter("third")
    with pytest.raises(AdapterError, match="no adapter is merged"):
        engine.unmerge_adapter()
    params = SamplingParams(max_tokens=4, adapter="other", ignore_eos=True)
    request = engine.add_request(PROMPT, params)
    engine.step()
    with pytest.raises(AdapterError, match=f"request {request} uses adapter 'other'"):
        engine.merge_adapter("own")
    while engine.has_pending():
        engine.step()
    engine.merge_adapter("own")
    sums = engine.weights_checksum()
    with pytest.raises(InvalidRequest, match="'other' is not available while adapter 'own'"):
        sample(engine, "other")
    with pytest.raises(AdapterError, match="'own' is already merged"):
        engine.merge_adapter("other")
    new = {"model.norm.weight": engine.model.params["norm"] * 1.5}
    for update in (engine.update_weights, engine.weight_sync.stage):
        with pytest.raises(WeightUpdateError, match="'own' is merged into the weights"):
            update(new)
    with pytest.raises(WeightUpdateError, match="'own' is merged into the weights"):
        engine.weight_sync.begin()
    assert engine.weights_checksum() == sums
    engine.unmerge_adapter()
    engine.update_weights({"model.norm.weight": engine.model.params["norm"]}, blocking=True)
    assert bits(sample(engine, "other")) == bits(beside)


def test_running_request_continues_under_the_merged_weights(engine: InferenceEngine) -> None:
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    engine.add_request(PROMPT, params)
    for _ in range(5):
        engine.step()
    engine.merge_adapter("own")
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    assert [span.version for span in samples[0].weight_versions] == [0, 1]
    engine.loop.check()


def test_merge_rejects_quantized_weights_and_open_sessions(folder: Path) -> None:
    with make(folder, quantization="int8") as engine:
        engine.load_adapter("own", adapter_of(folder, 0), SETTINGS)
        with pytest.raises(AdapterError, match="quantization='int8'"):
            engine.merge_adapter("own")
    with make(folder) as engine:
        engine.load_adapter("own", adapter_of(folder, 0), SETTINGS)
        engine.weight_sync.begin()
        with pytest.raises(AdapterError, match="during a weight update"):
            engine.merge_adapter("own")
        assert bits(sample(engine, "own"))


def params(adapter: str | None = "own", **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=12, seed=1, adapter=adapter, ignore_eos=True, **options)


def rest(engine: InferenceEngine) -> list[TrainingSample]:
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    engine.loop.check()
    return samples


def amid_a_merge(
    monkeypatch: pytest.MonkeyPatch, engine: InferenceEngine, do: Callable[[], object]
) -> None:
    """Call `do` once while merged weights are computed, then let the merge continue."""
    calls = iter([do])
    inner = adapters.merged

    def merged(*args: Any) -> Tensor:
        for call in calls:
            call()
        return inner(*args)

    monkeypatch.setattr(adapters, "merged", merged)
    engine.merge_adapter("own")


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_request_for_the_merged_adapter_keeps_it_merged(
    engine: InferenceEngine, steps: int
) -> None:
    engine.merge_adapter("own")
    merged, sums = sample(engine, "own"), engine.weights_checksum()
    request = engine.add_request(PROMPT, params())
    for _ in range(steps):
        engine.step()
    with pytest.raises(AdapterError, match=f"unmerged while request {request} uses adapter"):
        engine.unmerge_adapter()
    assert engine.weights_checksum() == sums
    (merged_sample,) = rest(engine)
    assert bits(merged_sample) == bits(merged)
    assert engine.unmerge_adapter() == 2


def test_scores_of_the_merged_adapter_use_merged_weights(engine: InferenceEngine) -> None:
    beside = score(engine, [PROMPT], adapter="own")[0]
    engine.merge_adapter("own")
    (by_name,), (by_weights,) = score(engine, [PROMPT], adapter="own"), score(engine, [PROMPT])
    assert by_name[1:].tolist() == by_weights[1:].tolist()
    engine.unmerge_adapter()
    assert score(engine, [PROMPT], adapter="own")[0][1:].tolist() == beside[1:].tolist()


@pytest.mark.thorough(cases=["cpu"])
def test_request_uses_the_merge_state_at_admission(
    engine: InferenceEngine,
) -> None:
    beside, intake = sample(engine, "own"), engine.intake
    (early,) = intake.sequences([PROMPT], params(), 1, False)
    (other,) = intake.sequences([PROMPT], params("other"), 1, False)
    engine.merge_adapter("own")
    merged = sample(engine, "own")
    engine.shared.enqueue(early)
    engine.shared.enqueue(other)
    (late,) = intake.sequences([PROMPT], params(), 1, False)
    samples = {each.request_id: each for each in rest(engine)}
    assert bits(samples[early.request_id]) == bits(merged)
    assert samples[other.request_id].finish_reason == "abort"
    assert samples[other.request_id].stop_reason == "adapter 'own' is merged into the weights"
    engine.unmerge_adapter()
    engine.shared.enqueue(late)
    (found_late,) = rest(engine)
    assert bits(found_late) == bits(beside)
    assert [span.version for span in found_late.adapter_versions] == [1]


def test_merged_engine_computes_only_the_weights(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sample(engine)
    built = {
        name: engine.intake.sequences([PROMPT], params(name), 1, False)[0]
        for name in ("own", "other")
    }

    def look() -> None:
        assert bits(sample(engine)) == bits(before)
        for name, seq in built.items():
            with pytest.raises(InvalidRequest, match="adapter 'own' is being merged into"):
                sample(engine, name)
            engine.shared.enqueue(seq)
            (ended,) = rest(engine)
            assert (
                ended.stop_reason == "adapter 'own' is being merged into the weights, or unmerged"
            )
            assert not ended.completion_tokens
        for call in (lambda: engine.merge_adapter("other"), engine.unmerge_adapter):
            with pytest.raises(AdapterError, match="adapter 'own' is being merged"):
                call()
        with pytest.raises(WeightUpdateConflict, match="'own' is merged into the weights"):
            engine.update_weights({"model.norm.weight": engine.model.params["norm"]})

    amid_a_merge(monkeypatch, engine, look)
    merged = sample(engine)
    assert bits(merged) != bits(before)
    assert bits(sample(engine, "own")) == bits(merged)


def test_failed_merge_leaves_no_trace(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, sums = sample(engine, "own"), engine.weights_checksum()

    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        amid_a_merge(monkeypatch, engine, fail)
    assert engine.weights_checksum() == sums
    assert bits(sample(engine, "own")) == bits(beside)
    engine.update_weights({"model.norm.weight": engine.model.params["norm"]}, blocking=True)


def test_merged_adapter_rejects_update_and_unload(
    engine: InferenceEngine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos, copy = engine.adapters(), str(tmp_path / "own.safetensors")
    new = adapter_of(folder, 7)
    engine.adapter_table.copy_to("own", copy)

    def look() -> None:
        for call in (
            lambda: engine.load_adapter("own", new, SETTINGS),
            lambda: engine.adapter_table.copy_from(copy),
            lambda: engine.unload_adapter("own"),
        ):
            with pytest.raises(
                AdapterError, match=r"'own' is merged .*; call unmerge_adapter\(\) first"
            ):
                call()

    amid_a_merge(monkeypatch, engine, look)
    look()
    assert engine.adapters() == infos
    engine.load_adapter("other", new, SETTINGS)  # the weights contain no other adapter
    engine.unload_adapter("other")
    engine.unmerge_adapter()
    assert engine.load_adapter("own", new, SETTINGS).version == 2


@pytest.mark.parametrize("when", ["before", "amid", "merged"])
def test_sleeping_weights_reject_merge_and_unmerge(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    # only whole pages are released, and tiny models have none
    monkeypatch.setattr(
        "nano_inference.device.sleep.discard",
        lambda tensor: as_torch(tensor).untyped_storage().fill_(0),
    )
    beside, sums = sample(engine, "own"), engine.weights_checksum()
    refused = pytest.raises(AdapterError, match="while the weights are asleep; call wake")

    def sleep() -> None:
        engine.sleep(weights=True)

    if when == "merged":
        engine.merge_adapter("own")
        sleep()
        with refused:
            engine.unmerge_adapter()
        engine.wake()
        engine.unmerge_adapter()
    elif when == "amid":
        with refused:
            amid_a_merge(monkeypatch, engine, sleep)
        engine.wake()
    else:
        sleep()
        with refused:
            engine.merge_adapter("own")
        engine.wake()
    assert engine.weights_checksum() == sums
    assert bits(sample(engine, "own")) == bits(beside)


def test_update_begun_before_a_merge_is_rejected_when_queued(
    engine: InferenceEngine,
) -> None:
    new = {"model.norm.weight": engine.model.params["norm"] * 1.5}
    began, go_on = threading.Event(), threading.Event()
    problems: list[Exception] = []

    def buckets() -> Iterator[dict[str, Tensor]]:
        began.set()
        assert go_on.wait(60)
        yield new

    def update() -> None:
        try:
            engine.weight_sync.stage(buckets())
        except WeightUpdateError as problem:
            problems.append(problem)

    thread = threading.Thread(target=update)
    thread.start()
    assert began.wait(60)
    engine.merge_adapter("own")
    sums = engine.weights_checksum()
    go_on.set()
    thread.join()
    rest(engine)
    assert [str(each) for each in problems] == [
        "adapter 'own' is merged into the weights; call unmerge_adapter() first."
    ]
    assert engine.weights_checksum() == sums


@pytest.mark.parametrize("undo", [False, True], ids=["merge", "unmerge"])
@pytest.mark.parametrize("written", [False, True], ids=["queued", "written"])
def test_ctrl_c_leaves_a_merge_complete(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch, undo: bool, written: bool
) -> None:
    beside, plain = sample(engine, "own"), engine.weights_checksum()
    if undo:
        engine.merge_adapter("own")
    before = engine.weights_checksum()
    manager, shared = engine.weight_sync, engine.shared
    queue, handle = manager._queue, shared.handle

    def interrupted_queue(*args: Any) -> Any:
        queue(*args)
        raise KeyboardInterrupt

    def interrupted_handle() -> None:
        version = manager.version
        handle()
        if manager.version != version:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if written:
            patch.setattr(shared, "handle", interrupted_handle)
        else:
            patch.setattr(manager, "_queue", interrupted_queue)
        with pytest.raises(KeyboardInterrupt):
            engine.unmerge_adapter() if undo else engine.merge_adapter("own")
    rest(engine)
    is_merged = undo != written
    assert (engine.weights_checksum() == before) == (not written)
    assert (engine.weights_checksum() == plain) == (not is_merged)
    if is_merged:
        engine.unmerge_adapter()
    assert engine.weights_checksum() == plain
    assert bits(sample(engine, "own")) == bits(beside)
    engine.update_weights({"model.norm.weight": engine.model.params["norm"]}, blocking=True)


def test_embed_during_a_merge_is_rejected_by_name(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> None:
        with pytest.raises(InvalidRequest, match="'own' is being merged"):
            engine.embed([PROMPT], adapter="own")

    amid_a_merge(monkeypatch, engine, look)
    (by_name,), (by_weights,) = engine.embed([PROMPT], adapter="own"), engine.embed([PROMPT])
    assert torch.equal(by_name, by_weights)
