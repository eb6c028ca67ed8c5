"""Gradients of experts: the backward pass uses the engine's expert choices."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import InferenceEngine, InvalidRequest, SamplingParams
from nano_inference.arrays import as_torch
from nano_inference.models.spec.experts import MoeSpec
from nano_inference.ops.cpu.moe import CpuMoeLayer
from nano_inference.ops.moe import Note
from nano_inference.ops.reference import backend as reference
from nano_inference.rl import PolicyModel, score
from nano_inference.rl.backward.decoder import KernelDecoder
from nano_inference.rl.backward.experts import ExpertLayer
from nano_inference.rl.micro_batch import MicroBatch, ScoredSequence, micro_batches
from nano_inference.rl.torch_decoder import TorchDecoder
from tests.models.tiny import tiny_model
from tests.rl.test_gradients import TOLERANCE, oracle_gradients
from tests.rl.training import SEQUENCES, bits, build, gradients

# token prefix up to a row -> chosen experts of each layer that has experts
Routes = dict[tuple[int, ...], list[list[int]]]
MIXED: dict[str, Any] = {
    "enable_prefix_caching": False,
    "max_chunk_tokens": 128,
    "max_tokens_per_batch": 256,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 32 experts, 4 per token, in bfloat16. float32 chooses other experts for some
    rows.
    """
    folder = tmp_path_factory.mktemp("experts")
    changes = {
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 4,
    }
    return tiny_model(folder, "qwen3-moe", std=0.15, **changes)


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Record the experts of every expert layer call from now on, by the backend's `route`."""
    calls: list[Tensor] = []

    mixture, call = reference.mixture, CpuMoeLayer.__call__

    def spy(steps: Any, x: Tensor, experts: Any, *rest: Any) -> Tensor:
        calls.append(steps.route(x, experts)[0])
        return mixture(steps, x, experts, *rest)

    def spied_call(
        layer: CpuMoeLayer, x: Any, out: Any, note: Note | None = None, routed: Any = None
    ) -> None:
        def record(ids: Any) -> None:
            calls.append(ids)
            if note is not None:
                note(ids)

        call(layer, x, out, record, routed)

    monkeypatch.setattr(reference, "mixture", spy)
    monkeypatch.setattr(CpuMoeLayer, "__call__", spied_call)
    return calls


def engine_routes(
    engine: InferenceEngine, routed: list[Tensor], sequences: list[list[int]]
) -> Routes:
    """Return the engine's choices when each sequence runs by itself in one piece."""
    assert engine.spec.moe is not None
    routes: Routes = {}
    for ids in sequences:
        routed.clear()
        score(engine, [ids])
        layers = (
            torch.stack([as_torch(ids) for ids in routed])
            .view(sum(engine.spec.moe.layers), len(ids) - 1, -1)
            .transpose(0, 1)
            .tolist()
        )
        routes |= {tuple(ids[: row + 1]): layers[row] for row in range(len(ids) - 1)}
    return routes


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], list[list[int]]]]:
    """Record the rows and experts of all backward passes from now on."""
    rows: list[tuple[tuple[int, ...], list[list[int]]]] = []
    hidden, experts = TorchDecoder.hidden, TorchDecoder._experts
    whole, forward = KernelDecoder.add_gradients, ExpertLayer.forward
    of_layers: list[Tensor] = []

    def record(moe: MoeSpec | None, batch: MicroBatch) -> None:
        assert moe is not None
        layers = torch.stack(of_layers[: sum(moe.layers)], dim=1).tolist()
        for segment in batch.segments:
            path = segment.path.tolist()
            tokens = batch.token_ids[segment.path].tolist()
            rows.extend((tuple(tokens[: place + 1]), layers[row]) for place, row in enumerate(path))

    def spied_experts(self: Any, normed: Tensor, params: Any, name: str, ids: Tensor) -> Tensor:
        of_layers.append(ids)
        return experts(self, normed, params, name, ids)

    def spied_hidden(self: Any, params: Any, embedded: Tensor, batch: MicroBatch) -> Tensor:
        of_layers.clear()
        out = hidden(self, params, embedded, batch)
        record(self.spec.moe, batch)
        return out

    def spied_forward(self: Any, weights: Any, normed: Tensor, ids: Tensor) -> Any:
        of_layers.append(ids)
        return forward(self, weights, normed, ids)

    def spied_whole(self: Any, weights: Any, batch: MicroBatch, *rest: Any) -> None:
        of_layers.clear()
        whole(self, weights, batch, *rest)
        record(self.spec.moe, batch)

    monkeypatch.setattr(TorchDecoder, "_experts", spied_experts)
    monkeypatch.setattr(TorchDecoder, "hidden", spied_hidden)
    monkeypatch.setattr(ExpertLayer, "forward", spied_forward)
    monkeypatch.setattr(KernelDecoder, "add_gradients", spied_whole)
    return rows


SCHEDULES: list[dict[str, Any]] = [
    {"backend": "cpu"},
    {
        "backend": "cpu",
        "cache_type": "radix",
        "block_size": 4,
        "max_chunk_tokens": 7,
        "lookahead": 1,
    },
    {"backend": "reference", "block_size": 4, "max_chunk_tokens": 5, "max_batch_size": 2},
]


@pytest.mark.thorough
@pytest.mark.parametrize("options", SCHEDULES)
def test_backward_uses_the_experts_of_the_engine(
    folder: Path, routed: list[Tensor], used: list[Any], options: dict[str, Any]
) -> None:
    with build(folder, dtype="bfloat16", **(MIXED | {"backend": options["backend"]})) as engine:
        expected = engine_routes(engine, routed, SEQUENCES)
    with build(folder, dtype="bfloat16", **options) as engine:
        model = PolicyModel(engine, micro_batch_tokens=64, num_workers=1)
        samples = engine.generate(
            [SEQUENCES[0]], SamplingParams(max_tokens=6, ignore_eos=True, seed=1), 2
        )
        whole = [[*sample.prompt_tokens, *sample.completion_tokens] for sample in samples]
        logprobs = model.logprobs(whole, from_position=len(SEQUENCES[0]))
        assert [bits(each) for each in logprobs] == [
            bits(torch.tensor(sample.logprobs)) for sample in samples
        ]
        gradients(model)
        # the prefixes are in the cache
        gradients(model, from_position=[len(each) // 2 for each in SEQUENCES])
        engine.loop.check()
    assert len(used) > 2 * len(expected)
    assert all(experts == expected[tokens] for tokens, experts in used)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradients_equal_transformers_with_the_same_experts(
    folder: Path, routed: list[Tensor], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare gradients of the kernels and of torch, in float32 at the rounded weights. With its
    own choices, transformers has other gradients.
    """
    from transformers import AutoModelForCausalLM

    with build(folder, dtype="bfloat16", **(MIXED | {"backend": backend})) as engine:
        expected = engine_routes(engine, routed, SEQUENCES)
        model = PolicyModel(engine, micro_batch_tokens=64, gradient_dtype=torch.float32)
        assert model.gradients == ("torch" if backend == "reference" else "kernels")
        grads = gradients(model, temperature=0.8)
    oracle: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    freely = oracle_gradients(oracle, grads, SEQUENCES, 0.8)
    oracle.zero_grad()

    def forced() -> Iterator[Tensor]:
        for ids in SEQUENCES:
            rows = [expected[tuple(ids[: row + 1])] for row in [*range(len(ids) - 1), len(ids) - 2]]
            yield from torch.tensor(rows).unbind(1)

    choices = forced()

    def topk(shares: Tensor, _k: int, dim: int) -> tuple[Tensor, Tensor]:
        ids = next(choices)
        return shares.gather(dim, ids), ids

    monkeypatch.setattr(torch, "topk", topk)
    theirs = oracle_gradients(oracle, grads, SEQUENCES, 0.8)
    assert not list(choices)
    assert difference(grads, theirs) <= TOLERANCE
    assert difference(grads, freely) > 0.01


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the relative norm of the difference of all gradients. An expert that no row chose has
    zeros.
    """
    assert set(ours) == set(theirs)
    squares = [
        (float((ours[name] - grad).square().sum()), float(grad.square().sum()))
        for name, grad in theirs.items()
    ]
    return (sum(each for each, _ in squares) / sum(each for _, each in squares)) ** 0.5


def test_rows_of_other_experts_are_not_shared() -> None:
    """Without `batch_invariant`, CUDA may route a shared prefix differently in two sequences."""
    chosen = torch.tensor([[[0, 1]], [[1, 3]]], dtype=torch.int16)
    experts = chosen, chosen.flip(0), torch.stack([chosen[0], chosen[0]])
    sequences = [ScoredSequence([5, 6, 7], 1, [1.0, 1.0], routes) for routes in experts]
    (batch,) = micro_batches(sequences, 64)
    assert batch.routes is not None
    assert batch.routes[:, 0].tolist() == [[0, 1], [1, 3], [1, 3], [0, 1], [0, 1]]
    assert batch.token_ids.tolist() == [5, 6, 5, 6, 6]
    assert [part.path.tolist() for part in batch.segments] == [[0, 1], [2, 3], [0, 4]]
    assert [len(part.token_ids) for part in micro_batches(sequences, 4)] == [4, 2]


def test_rows_without_recorded_experts_are_an_error() -> None:
    chosen = torch.tensor([[[0, 1]], [[1, 3]]], dtype=torch.int16)
    first = ScoredSequence([5, 6, 7], 1, [1.0, 1.0], chosen)
    with pytest.raises(RuntimeError, match="routes have 1 rows; 2 rows"):
        list(micro_batches([ScoredSequence([5, 6, 7], 1, [1.0, 1.0], chosen[:1])], 64))
    (batch,) = micro_batches([first, ScoredSequence([5, 9, 8], 1, [1.0, 1.0], chosen)], 64)
    assert batch.routes is not None
    assert batch.routes[:, 0].tolist() == [[0, 1], [1, 3], [1, 3]]


@pytest.mark.parametrize(
    "fault", [lambda ids: ids.fill_(-1), lambda ids: ids.zero_(), lambda ids: ids[:, :, :1]]
)
def test_empty_expert_record_is_an_error(
    folder: Path, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build(folder, dtype="bfloat16", backend="reference") as engine:
        model = PolicyModel(engine)
        record = engine.runner.models["trainer"].routes
        assert record is not None
        read = record.read
        monkeypatch.setattr(record, "read", lambda *where: fault(read(*where)))
        logprobs = model.logprobs([SEQUENCES[2]])[0]
        with pytest.raises(RuntimeError, match="choice of experts"):
            logprobs[1:].sum().backward()


@pytest.mark.thorough
def test_sample_experts_are_checked_against_the_model(folder: Path) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1, routed_experts=True)
    options: dict[str, Any] = {"dtype": "bfloat16", "enable_return_routed_experts": True}
    with build(folder, **options) as engine:
        samples = engine.generate([SEQUENCES[0][:20], SEQUENCES[1][:9]], params, 2)
        model = PolicyModel(engine, micro_batch_tokens=64)
        whole = [[*sample.prompt_tokens, *sample.completion_tokens] for sample in samples]
        experts = [sample.routed_experts for sample in samples]
        logprobs = model(
            whole, from_position=[20, 20, 9, 9], routed_experts=[*experts[:2], None, None]
        )
        assert [bits(each) for each in logprobs[:2]] == [
            bits(torch.tensor(sample.logprobs)) for sample in samples[:2]
        ]
        assert experts[2] is not None
        changed = bytearray(experts[2].data)
        layers, per_token = experts[2].shape[1:]
        changed[(10 * layers + 2) * per_token + 1] ^= 1
        wrong = [*experts[:2], replace(experts[2], data=bytes(changed)), experts[3]]
        with pytest.raises(InvalidRequest, match="sequence 2, token 10, layer 2: the sample used"):
            model(whole, routed_experts=wrong)
        model(whole, from_position=len(whole[2]), routed_experts=[None, None, wrong[2], None])
        for bad, message in [
            (experts[:3], "got 3 routed_experts for 4 sequences"),
            ([experts[2], *experts[1:]], "routed_experts of sequence 0 have shape"),
        ]:
            with pytest.raises(InvalidRequest, match=message):
                model(whole, routed_experts=bad)
        for name, param in model.named_parameters():  # other weights choose other experts
            if name.endswith("mlp.gate.weight"):
                param.data.neg_()
        with pytest.raises(InvalidRequest, match=r"sequence 0, token 0, layer 0"):
            model(whole, routed_experts=experts)
        engine.loop.check()
