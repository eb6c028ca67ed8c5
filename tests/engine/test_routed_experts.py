"""Experts that go out with samples are those of a plain forward, whatever the engine did."""

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
from nano_inference.models.loading import read_tensors
from tests.depth import at_depth
from tests.models.tiny import tiny_llama, tiny_model

SIZE = 4
CLOSE = 1e-4  # between the last expert that is chosen and the next: another order of additions
LAYERS = {"qwen3-moe": (True, False, True), "mixtral": (True, True)}
Weights = dict[str, Tensor]
Build = Callable[..., InferenceEngine]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Of each family the versions 0, 1 and 2 of its weights."""
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
        own = {
            "block_size": SIZE,
            "device": "cpu",
            "num_threads": 1,
            "kv_cache_memory": 2**20,
            "enable_return_routed_experts": True,
        }
        return InferenceEngine(EngineConfig(str(folders[family][0]), **(own | options)))

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
        """Of the routers, [rows, layers of experts, experts]; rows [start, end) of a span by its
        version, which attend to keys and values of those before.
        """
        from transformers import DynamicCache

        cache, found = DynamicCache(), list[Tensor]()
        for version, start, end in spans:
            self._logits.clear()
            model = self._models[version]
            name = {"cache", "past_key_values"} & {*inspect.signature(model.forward).parameters}
            given = {min(name): cache}  # newer releases of transformers have the first
            model(torch.tensor([tokens[start:end]]), use_cache=True, **given)
            found.append(torch.stack([each.view(end - start, -1) for each in self._logits], 1))
        return torch.cat(found)


@pytest.fixture(scope="module")
def oracles(folders: dict[str, list[Path]]) -> dict[str, Oracle]:
    return {family: Oracle(each) for family, each in folders.items()}


def check(sample: TrainingSample, oracle: Oracle, has_experts: Sequence[bool]) -> int:
    """Compare a sample's experts with those of the plain forward, as far as that decides clearly;
    returns how many choices were compared.
    """
    tokens = [*sample.prompt_tokens, *sample.completion_tokens]
    assert sample.routed_experts is not None, sample.routed_experts_unknown
    assert sample.routed_experts_unknown is None
    own = np.asarray(sample.routed_experts)
    assert own.shape[:2] == (len(tokens) - 1, len(has_experts))
    assert not own[:, [not each for each in has_experts]].any()
    spans = [(sample.weight_version, 0, len(tokens) - 1)]
    if sample.kv_versions:
        spans = [(each.version, each.start, each.end) for each in sample.kv_versions[-1].versions]
    logits = oracle.logits(tokens, spans)
    count = own.shape[2]
    best = logits.sort(dim=-1, descending=True)
    expected = best.indices[..., :count].sort(dim=-1).values.numpy()
    margin = (best.values[..., count - 1] - best.values[..., count]).amin(1)
    clear = (margin > CLOSE).numpy()
    routed = own[:, np.array(has_experts)]
    assert (routed[clear] == expected[clear]).all()
    assert clear.mean() > 0.9 or len(clear) < 20
    return int(clear.sum())


def drawn(max_tokens: int = 7, seed: int = 3, **options: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, seed=seed, routed_experts=True, **options
    )


def prompt_of(length: int, stem: int = 0) -> list[int]:
    """Prompts of one stem share it; what follows is their own."""
    own = [(13 * place + 7 * length) % 290 + 3 for place in range(length)]
    return [(5 * place) % 290 + 3 for place in range(stem)] + own


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
    {"backend": "cpu", "max_model_len": 64, "kv_cache_memory": 64 * 2400},  # it preempts
]
REQUESTS = st.tuples(
    st.integers(1, 21),  # tokens of its own
    st.sampled_from([0, 6, 12, 15]),  # tokens that others have too
    st.integers(1, 3),  # samples
    st.integers(1, 9),  # tokens of a completion
)
UPDATES = st.sampled_from(["recompute", "keep", "finish_old", "wait", "abort"])


@settings(
    max_examples=at_depth(60),
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # an example takes a second
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_experts_are_those_of_a_plain_forward(
    build: Build,
    folders: dict[str, list[Path]],
    oracles: dict[str, Oracle],
    data: st.DataObject,
) -> None:
    """Under prefix hits, forks, chunks, preemption, lookahead, drafts and updates of the weights:
    what is known is right, and what ended by itself is known.
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
