"""Experts reported with samples equal those of a plain forward under any engine activity."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import (
    ConfigError,
    EngineConfig,
    InferenceEngine,
    InvalidRequest,
    RequestTooLarge,
    RoutedExperts,
    SamplingParams,
    TrainingSample,
)
from nano_inference.checkpoints.loading import read_tensors
from nano_inference.device import cuda_runner, graphs, trunk_graphs
from tests.depth import at_depth
from tests.device.cuda_cases import CheckingQueue, conventional
from tests.models.tiny import tiny_llama, tiny_model

__all__ = ["conventional"]

SIZE = 4
CLOSE = 1e-4  # gap between the last chosen expert and the next; covers another order of additions
LAYERS = {"qwen3-moe": (True, False, True), "mixtral": (True, True)}
Weights = dict[str, Tensor]
Build = Callable[..., InferenceEngine]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Write weight versions 0, 1 and 2 of each family."""
    return {
        family: [
            tiny_model(tmp_path_factory.mktemp(family), family, std=0.3, seed=seed)
            for seed in range(3)
        ]
        for family in LAYERS
    }


@pytest.fixture(scope="module")
def build(folders: dict[str, list[Path]]) -> Iterator[Build]:
    threads = torch.get_num_threads()

    def make(family: str = "qwen3-moe", **options: Any) -> InferenceEngine:
        defaults = {
            "block_size": SIZE,
            "device": "cpu",
            "num_threads": 1,
            "kv_cache_memory": 2**20,
            "enable_return_routed_experts": True,
        }
        return InferenceEngine(EngineConfig(str(folders[family][0]), **(defaults | options)))

    yield make
    torch.set_num_threads(threads)


class Oracle:
    """transformers' routers in a plain forward, by weight version."""

    def __init__(self, folders: Sequence[Path]) -> None:
        from transformers import AutoModelForCausalLM

        self._logits: list[Tensor] = []
        self._models: list[Any] = []
        for folder in folders:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for name, module in model.named_modules():
                if name.endswith("mlp.gate"):
                    module.register_forward_hook(self._note)
            self._models.append(model)

    def _note(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._logits.append(output[0] if isinstance(output, tuple) else output)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], spans: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return router logits [rows, expert layers, experts]. Rows [start, end) of a span use its
        version and attend to keys and values of earlier spans.
        """
        from transformers import DynamicCache

        cache, rows = DynamicCache(), list[Tensor]()
        for version, start, end in spans:
            self._logits.clear()
            model = self._models[version]
            name = {"cache", "past_key_values"} & {*inspect.signature(model.forward).parameters}
            cache_option = {min(name): cache}  # the first name is newer
            model(torch.tensor([tokens[start:end]]), use_cache=True, **cache_option)
            rows.append(torch.stack([each.view(end - start, -1) for each in self._logits], 1))
        return torch.cat(rows)


@pytest.fixture(scope="module")
def oracles(folders: dict[str, list[Path]]) -> dict[str, Oracle]:
    return {family: Oracle(each) for family, each in folders.items()}


def check(sample: TrainingSample, oracle: Oracle, has_experts: Sequence[bool]) -> int:
    """Compare a sample's experts with those of the plain forward wherever its choice is clear.
    Return the number of compared choices.
    """
    tokens = [*sample.prompt_tokens, *sample.completion_tokens]
    assert sample.routed_experts is not None, sample.routed_experts_unknown
    assert sample.routed_experts_unknown is None
    experts = np.asarray(sample.routed_experts)
    assert experts.shape[:2] == (len(tokens) - 1, len(has_experts))
    assert not experts[:, [not each for each in has_experts]].any()
    spans = [(sample.weight_version, 0, len(tokens) - 1)]
    if sample.kv_versions:
        spans = [(each.version, each.start, each.end) for each in sample.kv_versions[-1].versions]
    logits = oracle.logits(tokens, spans)
    count = experts.shape[2]
    best = logits.sort(dim=-1, descending=True)
    expected = best.indices[..., :count].sort(dim=-1).values.numpy()
    margin = (best.values[..., count - 1] - best.values[..., count]).amin(1)
    clear = (margin > CLOSE).numpy()
    routed = experts[:, np.array(has_experts)]
    assert (routed[clear] == expected[clear]).all()
    assert clear.mean() > 0.9 or len(clear) < 20
    return int(clear.sum())


def drawn(max_tokens: int = 7, seed: int = 3, **options: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, seed=seed, routed_experts=True, **options
    )


def prompt_of(length: int, stem: int = 0) -> list[int]:
    """Return a prompt. Prompts of one stem share it and differ afterwards."""
    tail = [(13 * place + 7 * length) % 290 + 3 for place in range(length)]
    return [(5 * place) % 290 + 3 for place in range(stem)] + tail


def drain(engine: InferenceEngine) -> list[TrainingSample]:
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
        engine.loop.check()
    return samples


OPTIONS: list[dict[str, Any]] = [
    {"backend": "cpu"},
    {"backend": "cpu", "cache_type": "radix", "max_chunk_tokens": 5, "lookahead": 1},
    {"backend": "reference", "max_tokens_per_batch": 9, "max_batch_size": 4},
    {"backend": "cpu", "speculation": "suffix", "max_drafts": 3},
    {"backend": "reference", "draft_model": "self", "draft_layers": 1, "max_drafts": 3},
    {"backend": "cpu", "max_model_len": 64, "kv_cache_memory": 64 * 2400},  # preempts sequences
]
REQUESTS = st.tuples(
    st.integers(1, 21),  # tokens of one prompt
    st.sampled_from([0, 6, 12, 15]),  # tokens shared with other prompts
    st.integers(1, 3),  # samples
    st.integers(1, 9),  # tokens per completion
)
UPDATES = st.sampled_from(["recompute", "keep", "finish_old", "wait", "abort"])


@pytest.mark.thorough
@settings(
    max_examples=at_depth(60),
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # an example takes a second
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_experts_equal_those_of_a_plain_forward(
    build: Build,
    folders: dict[str, list[Path]],
    oracles: dict[str, Oracle],
    data: st.DataObject,
) -> None:
    """Cover prefix hits, forks, chunks, preemption, lookahead, drafts and updates: known experts
    are right, and a sample that ended by itself has all of them.
    """
    family = data.draw(st.sampled_from(sorted(LAYERS)))
    options = data.draw(st.sampled_from(OPTIONS))
    if family == "mixtral" and "kv_cache_memory" in options:
        options = {"backend": "cpu"}
    samples: list[TrainingSample] = []
    with build(family, **options) as engine:
        for version in range(3):
            for seed, (length, stem, count, most) in enumerate(
                data.draw(st.lists(REQUESTS, min_size=1, max_size=4))
            ):
                engine.add_request(prompt_of(length, stem), drawn(most, seed), count)
            for _ in range(data.draw(st.integers(0, 6))):
                samples += engine.step()
            if version < 2:
                weights = dict(read_tensors(folders[family][version + 1]))
                engine.update_weights(weights, kv_policy=data.draw(UPDATES))
        samples += drain(engine)
    for sample in samples:
        if sample.routed_experts is None:
            assert sample.routed_experts_unknown
            assert sample.finish_reason == "abort" or options.get("lookahead")
        else:
            check(sample, oracles[family], LAYERS[family])


@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [False, True])
def test_cuda_steps_record_experts(
    build: Build, oracles: dict[str, Oracle], graphs: bool, lookahead: int
) -> None:
    """Cover chunks, forks, prefix hits, and batches that are padded to the size of a graph."""
    how = {"cuda_graphs": graphs, "lookahead": lookahead, "max_chunk_tokens": 5}
    with build(backend="cuda", **how) as engine:
        samples = engine.generate([prompt_of(6), prompt_of(11, 12)], drawn(6), 3)
        again = engine.generate([prompt_of(6)], drawn(6), 3)
        counts: Any = engine.runner
        assert (counts.num_replays > 5) is (counts.num_trunk_replays > 1) is graphs
        assert (counts.num_eager_steps == 0) is graphs
    assert again[0].cached_tokens
    assert [each.routed_experts for each in samples[:3]] == [each.routed_experts for each in again]
    for sample in samples + again:
        check(sample, oracles["qwen3-moe"], LAYERS["qwen3-moe"])


@pytest.mark.usefixtures("conventional")
def test_aborted_prompts_on_cuda_have_right_or_unknown_experts(
    build: Build, oracles: dict[str, Oracle]
) -> None:
    """A step is in flight when its prompts are aborted."""
    with build(backend="cuda", lookahead=1, max_chunk_tokens=5) as engine:
        engine.generate([prompt_of(40)], drawn())  # slots hold experts of other tokens
        engine.flush_cache()
        for length in (4, 9, 14):
            engine.add_request(prompt_of(length), drawn(9))
        engine.step()
        engine.step()
        assert engine.loop.in_flight
        samples = engine.abort()
    known = [sample for sample in samples if sample.routed_experts is not None]
    assert known
    for sample in known:
        check(sample, oracles["qwen3-moe"], LAYERS["qwen3-moe"])


@pytest.mark.thorough
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_triton_kernels_record_experts(
    build: Build,
    oracles: dict[str, Oracle],
    monkeypatch: pytest.MonkeyPatch,
    batch_invariant: bool,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(CheckingQueue, "warms_up", False)
    monkeypatch.setattr(cuda_runner, "queue_of", lambda _device: CheckingQueue())
    monkeypatch.setattr(graphs, "graph_sizes", lambda largest: (largest,))
    monkeypatch.setattr(trunk_graphs, "trunk_sizes", lambda largest: (12,))
    options = {"max_batch_size": 3, "max_model_len": 24, "lookahead": 1}
    with build(backend="cuda", batch_invariant=batch_invariant, **options) as engine:
        samples = engine.generate([prompt_of(9)], drawn(3), 2)
        counts: Any = engine.runner
        assert counts.num_replays
        assert counts.num_trunk_replays
    for sample in samples:
        check(sample, oracles["qwen3-moe"], LAYERS["qwen3-moe"])


def test_forks_and_copied_blocks_have_their_first_row(
    build: Build, oracles: dict[str, Oracle]
) -> None:
    """The prompt ends inside a block: its samples share that block and copy it on their first
    write.
    """
    with build() as engine:
        samples = engine.generate([prompt_of(6)], drawn(6), 4)
        again = engine.generate([prompt_of(6)], drawn(6), 4)
    assert len({sample.completion_tokens for sample in samples}) > 1
    assert again[0].cached_tokens
    for sample in samples + again:
        check(sample, oracles["qwen3-moe"], LAYERS["qwen3-moe"])
    assert [each.routed_experts for each in samples] == [each.routed_experts for each in again]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_preempted_rows_are_recorded_again(
    build: Build, oracles: dict[str, Oracle], lookahead: int
) -> None:
    options = {"max_model_len": 40, "kv_cache_memory": 60 * 780, "lookahead": lookahead}
    with build(enable_prefix_caching=False, **options) as engine:
        prompts = [prompt_of(9), prompt_of(10), prompt_of(11)]
        samples = engine.generate(prompts, drawn(20), 2)
        assert engine.stats().num_preemptions > 0
    known = [sample for sample in samples if sample.routed_experts is not None]
    assert len(known) >= len(samples) - lookahead * engine.stats().num_preemptions
    for sample in known:
        check(sample, oracles["qwen3-moe"], LAYERS["qwen3-moe"])


@pytest.mark.parametrize("kv_policy", ["finish_old", "keep", "recompute"])
def test_update_mid_sample_keeps_the_record(
    build: Build, folders: dict[str, list[Path]], oracles: dict[str, Oracle], kv_policy: str
) -> None:
    """Tokens under old weights or old keys have the old experts. Later tokens have the new experts,
    in the same slots.
    """
    with build() as engine:
        engine.generate([prompt_of(40)], drawn())  # slots hold experts of other tokens
        engine.flush_cache()
        engine.add_request(prompt_of(9), drawn(12), 2)
        for _ in range(4):
            engine.step()
        weights = dict(read_tensors(folders["qwen3-moe"][1]))
        engine.update_weights(weights, kv_policy=kv_policy)
        engine.add_request(prompt_of(9), drawn(12))
        samples = drain(engine)
        samples += engine.generate([prompt_of(9)], drawn(12))
    assert {each.weight_version for each in samples} == (
        {0, 1} if kv_policy == "finish_old" else {1}
    )
    for sample in samples:
        check(sample, oracles["qwen3-moe"], LAYERS["qwen3-moe"])


def test_record_changes_no_bit(build: Build) -> None:
    def made(**options: Any) -> list[Any]:
        with build(max_chunk_tokens=5, **options) as engine:
            asked = drawn(8) if engine.config.enable_return_routed_experts else plain
            samples = engine.generate([prompt_of(11), prompt_of(3, 12)], asked, 2)
            return [(each.completion_tokens, each.logprobs) for each in samples]

    plain = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)
    assert made() == made(enable_return_routed_experts=False)


def test_blocks_of_another_engine_leave_the_experts_unknown(
    build: Build, oracles: dict[str, Oracle]
) -> None:
    """The slots may hold experts of other tokens of this engine."""
    with build() as source, build() as target:
        target.generate([prompt_of(30)], drawn())
        target.flush_cache()
        prompt = prompt_of(18)
        source.generate([prompt], drawn(1))
        piece = source.blocks.export_blocks(source.blocks.names(prompt))
        assert piece is not None
        assert target.blocks.import_blocks(piece) == 4
        foreign, local = target.generate([prompt, prompt_of(9)], drawn())
        assert foreign.cached_tokens == 16
        assert foreign.routed_experts is None
        assert foreign.routed_experts_unknown == (
            "keys of 16 of 24 tokens came from another engine or from a file"
        )
        check(local, oracles["qwen3-moe"], LAYERS["qwen3-moe"])
        target.flush_cache()  # rows computed here are known again
        check(target.generate([prompt], drawn())[0], oracles["qwen3-moe"], LAYERS["qwen3-moe"])


def test_sample_that_ends_without_keys_has_unknown_experts(build: Build) -> None:
    with build(max_batch_size=1) as engine:
        first, second = (engine.add_request(prompt_of(9), drawn(9)) for _ in range(2))
        for _ in range(3):
            engine.step()
        samples = {sample.request_id: sample for sample in engine.abort()}
    assert samples[first].routed_experts is not None
    assert samples[second].routed_experts is None
    assert samples[second].routed_experts_unknown == (
        "only 0 of 8 tokens had keys in the cache when the sample ended"
    )


def test_resumed_sample_has_all_its_experts(build: Build, oracles: dict[str, Oracle]) -> None:
    with build() as engine:
        whole = engine.generate([prompt_of(9)], drawn(9))[0]
        engine.add_request(prompt_of(9), drawn(9))
        for _ in range(4):
            engine.step()
        (partial,) = engine.abort()
        engine.resume_from(partial, append=[5, 6, 7])
        (resumed,) = drain(engine)
    check(partial, oracles["qwen3-moe"], LAYERS["qwen3-moe"])
    check(resumed, oracles["qwen3-moe"], LAYERS["qwen3-moe"])
    assert whole.routed_experts is not None
    assert partial.routed_experts is not None
    assert partial.routed_experts == whole.routed_experts.rows(0, partial.routed_experts.shape[0])


def test_streamed_and_scored_samples_have_experts(
    build: Build, folders: dict[str, list[Path]], oracles: dict[str, Oracle]
) -> None:
    with build(ref_model_path=str(folders["qwen3-moe"][1])) as engine:
        deltas = [*engine.generate([prompt_of(7)], drawn(), stream=True)]
        plain = engine.generate([prompt_of(7)], SamplingParams(max_tokens=2))[0]
    (sample,) = [each.finished for each in deltas if each.finished is not None]
    assert sample.ref_logprobs is not None
    check(sample, oracles["qwen3-moe"], LAYERS["qwen3-moe"])
    assert plain.routed_experts is plain.routed_experts_unknown is None


def test_experts_are_rejected_without_a_record(
    build: Build, tmp_path: Path, folders: dict[str, list[Path]]
) -> None:
    with build(enable_return_routed_experts=False) as engine:
        with pytest.raises(InvalidRequest, match="enable_return_routed_experts=True"):
            engine.generate([[5, 6]], drawn())
        assert engine.model.routes is None
    with pytest.raises(ConfigError, match="LlamaForCausalLM, which has no routed experts"):
        InferenceEngine(EngineConfig(str(tiny_llama(tmp_path)), enable_return_routed_experts=True))
    with pytest.raises(InvalidRequest, match="routed_experts must be True or False"):
        SamplingParams(routed_experts=1)  # pyright: ignore[reportArgumentType]
    for name, value, message in [
        ("tensor_parallel", 2, "tensor_parallel=2"),
        ("expert_parallel", 2, "expert_parallel=2"),
        ("pipeline_parallel", 2, "pipeline_parallel=2"),
    ]:
        options: dict[str, Any] = {name: value, "enable_return_routed_experts": True}
        with pytest.raises(ConfigError, match=f"enable_return_routed_experts.*{message}"):
            EngineConfig(str(folders["qwen3-moe"][0]), **options)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gemma4-moe"])
def test_record_is_counted_as_part_of_the_cache(
    build: Build, folders: dict[str, list[Path]], tmp_path: Path, family: str
) -> None:
    folder = folders[family][0] if family in folders else tiny_model(tmp_path, family)
    config = EngineConfig(
        str(folder), device="cpu", kv_cache_memory=2**18, enable_return_routed_experts=True
    )
    with InferenceEngine(config) as engine:
        record = engine.model.routes
        assert record is not None
        taken = sum(tensor.nbytes for tensor in engine.runner.storage.tensors)
        record_bytes = record._ids[:, :-1].nbytes
        assert taken + record_bytes <= engine.memory_budget.kv_cache <= 2**18
        assert record_bytes > 0


def test_experts_count_against_the_request_budget(build: Build) -> None:
    with build(max_request_entries=100) as engine:
        engine.generate([prompt_of(10)], drawn(10))
        with pytest.raises(RequestTooLarge, match="lower num_samples from 5 to 4"):
            engine.generate([prompt_of(10)], drawn(5), 5)


def test_array_has_its_documented_shape() -> None:
    ids = np.arange(24, dtype="<u2").reshape(4, 2, 3) + 300
    routed = RoutedExperts((4, 2, 3), "uint16", ids.tobytes())
    assert (np.asarray(routed) == ids).all()
    for start, end in [(0, None), (1, None), (1, 3), (4, None), (9, 12), (0, 0)]:
        part = np.asarray(routed.rows(start, end))
        assert part.shape == ids[start:end].shape
        assert (part == ids[start:end]).all()
    bytes_of = RoutedExperts((2, 2, 1), "uint8", bytes(range(4)))
    assert np.asarray(bytes_of).tolist() == [[[0], [1]], [[2], [3]]]
    assert bytes_of.rows(1).data == bytes([2, 3])
