"""Pipeline stages on threads give the bits of one rank."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from nano_inference import (
    ConfigError,
    EngineConfig,
    InferenceEngine,
    SamplingParams,
    TrainingSample,
)
from nano_inference.checkpoints.loading import load_spec, read_tensors
from nano_inference.config import Backend, CacheType
from nano_inference.device.kv_tensors import KVStorage, common_layout
from nano_inference.device.units import UnitMap
from nano_inference.kv_cache.sliding_window import UnitPool
from nano_inference.models.parameters.storage import num_bytes
from nano_inference.models.parameters.table import param_table
from nano_inference.models.sharding.shard import shard_of, split_layers
from nano_inference.parallel.mesh import Mesh, Place
from nano_inference.types import KvPolicy
from tests.invariance.scenario import Request, Schedule, run, same_bits
from tests.models.tiny import tiny_model
from tests.parallel.threads import mesh_engine, poison

LAYERS = 4
# of all layers, K and V
TOKEN_BYTES = {"float32": LAYERS * 2 * 2 * 16 * 4, "bfloat16": LAYERS * 2 * 2 * 16 * 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tiny_model(
                tmp_path_factory.mktemp(family) / "model", family, num_hidden_layers=LAYERS
            )
        return made[family]

    return make


def work() -> list[Request]:
    """Return prompts with a shared stem, long prompts, groups, penalties, scores and an abort."""
    stem = tuple(3 + i * 7 % 200 for i in range(50))
    penalties = {"presence_penalty": 0.6, "repetition_penalty": 1.2}
    return [
        Request(
            (*stem, 9), SamplingParams(max_tokens=9, seed=1, raw_logprobs=True, top_logprobs=3), 3
        ),
        Request((*stem, 8, 7), SamplingParams(max_tokens=7, seed=2, temperature=0.0)),
        Request((5, 6), SamplingParams(max_tokens=12, seed=3, top_p=0.8, **penalties), 2),
        Request(
            stem[:33],
            SamplingParams(max_tokens=5, seed=4, prompt_logprobs=True, prompt_top_logprobs=2),
        ),
        Request(
            (*stem, 9), SamplingParams(max_tokens=9, seed=5, top_k=5, min_p=0.02), 2, arrives=3
        ),
        Request((11,) * 40, SamplingParams(max_tokens=9, seed=6), 2, arrives=2, aborted=9),
    ]


def through(mesh: Mesh, config: EngineConfig) -> AbstractContextManager[InferenceEngine]:
    return mesh_engine(config, mesh)


def check(model: Path, dtype: str, schedule: Schedule, mesh: Mesh) -> int:
    """Run the work on one rank and on many. Return the number of preemptions."""
    alone, _ = run(
        model, dtype, work(), Schedule(backend=schedule.backend, num_threads=1), TOKEN_BYTES[dtype]
    )
    together, preemptions = run(
        model,
        dtype,
        work(),
        schedule,
        TOKEN_BYTES[dtype],
        make=partial(through, mesh),
        poison=poison,
        known={key: sample.completion_tokens for key, sample in alone.items()},
    )
    assert together.keys() == alone.keys()
    for key, sample in together.items():
        aborted = sample.finish_reason == "abort"
        assert not aborted or work()[key[0]].aborted is not None, "it read what it may not"
        assert same_bits(sample, alone[key]), f"request and sample {key}: other bits"
    return preemptions


@pytest.mark.thorough
@pytest.mark.parametrize("cache_type", ["paged", "radix"])
@pytest.mark.parametrize(
    ("stages", "backend", "dtype"), [(2, "reference", "float32"), (4, "cpu", "bfloat16")]
)
def test_stages_change_no_bit(
    models: Any, stages: int, backend: Backend, dtype: str, cache_type: CacheType
) -> None:
    """The cache is so small that sequences are preempted, and prompts run in chunks."""
    tight = Schedule(
        block_size=4,
        max_chunk_tokens=11,
        num_blocks=19,
        cache_type=cache_type,
        backend=backend,
        num_threads=1,
    )
    assert check(models("llama"), dtype, tight, Mesh(pipeline=stages)) > 0
    drafted = replace(tight, drafts="changing")
    assert check(models("llama"), dtype, drafted, Mesh(pipeline=stages)) > 0


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "dtype"), [("reference", "float32"), ("cpu", "bfloat16")])
def test_tensor_ranks_in_stages_change_no_bit(models: Any, backend: Backend, dtype: str) -> None:
    schedule = Schedule(
        block_size=4,
        max_chunk_tokens=19,
        num_blocks=19,
        cache_type="radix",
        backend=backend,
        num_threads=1,
    )
    assert check(models("llama"), dtype, schedule, Mesh(tensor=2, pipeline=2)) > 0
    drafted = replace(schedule, drafts="changing")
    assert check(models("llama"), dtype, drafted, Mesh(tensor=2, pipeline=2)) > 0


@pytest.mark.thorough(cases=["gemma3", "qwen3-moe"])
@pytest.mark.parametrize("family", ["gemma3", "granite", "olmo2", "qwen3-moe"])
def test_stages_change_no_bit_of_any_family(models: Any, family: str) -> None:
    """Cover windows, scaled additions, norms after the blocks, and experts."""
    schedule = Schedule(
        block_size=8, num_blocks=60, max_chunk_tokens=17, max_tokens_per_batch=40, num_threads=1
    )
    check(models(family), "bfloat16", schedule, Mesh(pipeline=2))


def test_groups_beyond_the_stage_count_change_no_bit(models: Any) -> None:
    schedule = Schedule(block_size=8, num_blocks=60, max_chunk_tokens=17, num_threads=1)
    alone, _ = run(models("llama"), "float32", work(), schedule, TOKEN_BYTES["float32"])

    def make(config: EngineConfig) -> AbstractContextManager[InferenceEngine]:
        return mesh_engine(config, Mesh(pipeline=2), groups=3)

    together, _ = run(
        models("llama"), "float32", work(), schedule, TOKEN_BYTES["float32"], make, poison
    )
    assert all(same_bits(together[key], alone[key]) for key in alone)


def other_weights(model: Path, change: float) -> dict[str, torch.Tensor]:
    return {name: tensor * (1 + change) for name, tensor in read_tensors(model)}


def config_of(model: Path, **options: Any) -> EngineConfig:
    settled = {
        "kv_cache_memory": 2**22,
        "num_threads": 1,
        "seed": 0,
        "max_chunk_tokens": 13,
        "backend": "reference",
    }
    return EngineConfig(str(model), **(settled | options))


def drained(engine: InferenceEngine) -> list[TrainingSample]:
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    return samples


def life(
    engine: InferenceEngine, model: Path, policy: KvPolicy
) -> dict[tuple[int, int], TrainingSample]:
    """Run requests, a weight update during them, and more requests."""
    params = [SamplingParams(max_tokens=10, seed=i, ignore_eos=True) for i in range(8)]
    for i in range(4):
        engine.add_request([3 + i] * (4 + 9 * i), params[i], num_samples=1 + i % 2)
    samples: list[TrainingSample] = []
    for _ in range(9):
        samples += engine.step()
    assert all(seq.num_completion_tokens for seq in engine.loop.sequences.by_id.values()), (
        "all have begun"
    )
    assert engine.loop.in_flight or engine.config.pipeline_parallel == 1
    update = engine.update_weights(other_weights(model, 0.1), kv_policy=policy)
    for i in range(4, 8):
        engine.add_request([3 + i] * (5 + 3 * i), params[i])
    samples += drained(engine)
    assert update.result(1) == 1
    return {(sample.request_id, sample.sample_index): sample for sample in samples}


@pytest.mark.parametrize("policy", ["wait", "finish_old"])
def test_running_request_finishes_on_the_old_weights(models: Any, policy: KvPolicy) -> None:
    """With `finish_old`, batches of old and new weights go through the stages in one step."""
    model = models("llama")
    with InferenceEngine(config_of(model)) as engine:
        alone = life(engine, model, policy)
    with mesh_engine(config_of(model), Mesh(pipeline=2)) as engine:
        together = life(engine, model, policy)
    assert together.keys() == alone.keys()
    for key, sample in together.items():
        assert sample.weight_versions == alone[key].weight_versions
        assert same_bits(sample, alone[key])


@pytest.mark.thorough
def test_update_in_the_middle_is_exact(models: Any) -> None:
    """Each sample follows the old weights up to some token, then the new weights."""
    model = models("llama")
    with mesh_engine(config_of(model), Mesh(pipeline=4)) as engine:
        samples = life(engine, model, "recompute")
    with InferenceEngine(config_of(model)) as old, InferenceEngine(config_of(model)) as new:
        new.update_weights(other_weights(model, 0.1), blocking=True)
        for sample in samples.values():
            spans, params = sample.weight_versions, sample.sampling_params
            assert params is not None
            switch = spans[-1].start if spans[-1].version == 1 else len(sample.completion_tokens)
            if sample.sample_index:
                continue  # another sample's noise cannot be requested
            first = old.generate([list(sample.prompt_tokens)], params)[0]
            assert first.completion_tokens[:switch] == sample.completion_tokens[:switch]
            assert first.logprobs[:switch] == sample.logprobs[:switch]
            if switch < len(sample.completion_tokens):
                known = [*sample.prompt_tokens, *sample.completion_tokens[:switch]]
                rest = SamplingParams(max_tokens=10 - switch, seed=params.seed, ignore_eos=True)
                then = new.generate([known], rest)[0]
                assert then.completion_tokens == sample.completion_tokens[switch:]
                assert then.logprobs == sample.logprobs[switch:]
    assert any(len(sample.weight_versions) > 1 for sample in samples.values())


def test_reference_model_scores_through_the_stages(models: Any) -> None:
    model = models("llama")
    config = config_of(model, ref_model_path=str(model))
    params = SamplingParams(max_tokens=6, seed=3)
    with InferenceEngine(config) as engine:
        alone = engine.generate([[5, 6, 7] * 9, [4]], params, 2)
    with mesh_engine(config, Mesh(pipeline=2)) as engine:
        together = engine.generate([[5, 6, 7] * 9, [4]], params, 2)
    assert [s.ref_logprobs for s in together] == [s.ref_logprobs for s in alone]
    assert all(len(s.ref_logprobs or ()) == 6 for s in together)


def test_wait_time_is_separated_from_work(models: Any) -> None:
    """A single sequence is in one stage at a time, so the other stage waits."""
    with mesh_engine(config_of(models("llama")), Mesh(pipeline=2)) as engine:
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=30, ignore_eos=True))
        stats = engine.stats()
    assert len(stats.ranks_busy) == len(stats.ranks_waiting) == 2
    assert min(stats.ranks_busy) > 0
    assert stats.ranks_waiting[1] > 0, "for the rows of the first stage"
    assert stats.ranks_waiting[0] > 0, "for samples"


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stage_holds_only_its_layers(models: Any, family: str, stages: int) -> None:
    spec = load_spec(models(family))
    places = [Place(Mesh(pipeline=stages), rank) for rank in range(stages)]
    parts = [shard_of(spec, place) for place in places]
    assert [layer for part in parts for layer in part.layers] == list(range(LAYERS))
    device, held = torch.device("cpu"), 0
    layout = common_layout([spec], 500, stages)
    pool = UnitMap(UnitPool(40, 3, layout), device) if layout.num_sliding else None
    for part in parts:
        storage = KVStorage(part.spec, 3, 8, torch.float32, device, pool)
        held += storage.keys[:, :, 0].numel() * (layout.num_units if pool else 1)
        assert len(set(storage.places)) == len(part.layers), "every layer has a place of its own"
        for (unit, _), window in zip(storage.places, part.spec.windows, strict=True):
            assert (unit >= layout.num_full) == (0 < window < 500)
        if stages > 1:
            assert num_bytes(param_table(spec, part), torch.float32) < num_bytes(
                param_table(spec), torch.float32
            )
    whole = KVStorage(spec, 1, 8, torch.float32, device).keys.numel()
    assert whole <= held <= (whole if family == "llama" else 3 * whole), (
        "of all stages together; some units are not full where stages are unlike"
    )


def test_layers_are_spread_by_weight(models: Any) -> None:
    spec = load_spec(models("llama"))
    deep = replace(spec, num_layers=30, windows=(0,) * 30, vocab_size=1000)
    sizes = [len(layers) for layers in split_layers(deep, 3)]
    assert sum(sizes) == 30
    assert sizes[1] > sizes[0], "the ends bear embedding and head"
    assert [len(layers) for layers in split_layers(deep, 30)] == [1] * 30
    wide = replace(deep, vocab_size=10**7)
    assert [len(layers) for layers in split_layers(wide, 3)] == [1, 28, 1]
    with pytest.raises(ConfigError, match="pipeline_parallel=31 exceeds the model's 30 layers"):
        split_layers(deep, 31)
