"""Batches with arbitrary targets, one or several per token: loss, logprobs and gradients of every
loss function against plain torch on transformers and PEFT, in float32.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from nano_inference import EngineConfig
from nano_training_service.base import Adapter
from nano_training_service.config import TrainServiceConfig
from nano_training_service.engine_base import EngineBase
from nano_training_service.errors import Refused
from nano_training_service.losses import LOSSES
from nano_training_service.protobuf import Datum, ForwardBackward
from nano_training_service.trainer import Bounds, Trainer
from tests.models.tiny import tiny_llama
from tests.rl.test_activations import counted
from tests.rl.training import bits, gradients

VOCAB = 259
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)


def _ppo(ratio: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * a, torch.clamp(ratio, low, high) * a)


def _gspo(p: Tensor, given: dict[str, Tensor]) -> Tensor:
    marked = given["sequence_ratio_mask"] > 0
    apart = (p.detach() - given["logprobs"])[marked].sum() / marked.sum()
    return _ppo((apart + p - p.detach()).exp(), given["advantages"], 0.9, 1.1)


ORACLES: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "cross_entropy": lambda p, _: -p,
    "importance_sampling": lambda p, given: -(p - given["logprobs"]).exp() * given["advantages"],
    "ppo": lambda p, given: _ppo((p - given["logprobs"]).exp(), given["advantages"], 0.9, 1.1),
    "cispo": lambda p, given: (
        -torch.clamp((p.detach() - given["logprobs"]).exp(), 0.9, 1.1) * given["advantages"] * p
    ),
    "dro": lambda p, given: -(p * given["advantages"] - 0.25 * (p - given["logprobs"]).square()),
    "gspo": _gspo,
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    for name in ("ppo", "cispo", "gspo")
} | {"dro": {"beta": 0.5}}


class Both:
    """A trainer of an adapter with random weights, and the same adapter in PEFT."""

    def __init__(self, folder: Path) -> None:
        model = tiny_llama(folder / "model", vocab_size=VOCAB, std=0.1)
        config = EngineConfig(str(model), dtype="float32", num_threads=1, kv_cache_memory=2**24)
        self.base = EngineBase(config, TrainServiceConfig(max_samplers=1, max_rank=4))
        policy: Any = self.base.new_policy("own", Adapter(rank=4, seed=1))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in policy.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.05)
        policy.save_pretrained(folder / "adapter")
        self.trainer = Trainer(policy, Bounds(self.base.max_model_len, VOCAB, 2000))
        oracle = AutoModelForCausalLM.from_pretrained(model)
        self.oracle = PeftModel.from_pretrained(oracle, folder / "adapter", is_trainable=True)
        self.oracle.eval()

    def run(self, data: list[Datum], loss_fn: str, config: dict[str, float | str]) -> Any:
        """Run the batch and return its result with the gradients under PEFT's names."""
        self.trainer.drop_gradients()
        result = self.trainer.run_batch(ForwardBackward("m", 1, loss_fn, config, tuple(data)))
        own = {name: param.grad for name, param in self.trainer.policy.named_parameters()}
        return result, own

    def expected(self, data: list[Datum], loss_fn: str) -> Any:
        """Compute logprobs, loss and gradients with plain torch."""
        self.oracle.zero_grad()
        logprobs, losses = [], []
        for datum in data:
            given = {name: torch.tensor(each) for name, each in datum.inputs.items()}
            rows = self.oracle(torch.tensor([datum.tokens])).logits[0].log_softmax(-1)
            targets = given.pop("target_tokens")
            p = rows.gather(1, targets.view(len(targets), -1)).view(targets.shape)
            factor = given.get("weights", torch.ones(())) * given.get("mask", torch.ones(()))
            losses.append((ORACLES[loss_fn](p, given) * factor).sum())
            logprobs.append(p.detach().numpy())
        loss: Any = sum(losses)
        loss.backward()
        grads = {
            name.replace(".default", ""): param.grad
            for name, param in self.oracle.named_parameters()
            if param.grad is not None
        }
        return logprobs, float(loss), grads


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    made = Both(tmp_path_factory.mktemp("targets"))
    yield made
    made.base.close()


def test_policies_of_the_service_recompute_as_chosen(tmp_path: Path) -> None:
    model, results = tiny_llama(tmp_path, vocab_size=VOCAB), list[Any]()
    config = EngineConfig(str(model), num_threads=1, kv_cache_memory=2**24)
    for choice in (False, True):
        base = EngineBase(config, TrainServiceConfig(recompute_activations=choice))
        policy: Any = base.new_policy("own", Adapter(rank=4, seed=1))
        with counted() as computed:
            grads = {name: bits(grad) for name, grad in gradients(policy, [[3, 4, 5, 6]]).items()}
        results.append((grads, len(computed)))
        base.close()
    (kept, passes), (recomputed, more) = results
    assert recomputed == kept
    assert more == 2 * passes > 0


def batch(loss_fn: str, columns: int | None, seed: int = 1) -> list[Datum]:
    """Return random sequences. The first half of each has zero factors and zero targets."""
    chance, data = np.random.default_rng(seed), []
    for length in (7, 30):
        shape = (length,) if columns is None else (length, columns)
        half = length // 2
        targets = chance.integers(0, VOCAB, shape)
        mask = np.ones(shape, np.float32)
        targets[:half], mask[:half] = 0, 0.0
        inputs: dict[str, Any] = {"target_tokens": targets}
        if loss_fn == "cross_entropy":
            inputs["weights"] = mask * chance.normal(size=shape).astype(np.float32)
        else:
            inputs["advantages"] = mask * chance.normal(size=shape).astype(np.float32)
            # near the policy's own, so that only some ratios are clipped
            inputs["logprobs"] = (-5.6 + chance.normal(size=shape) * 0.3).astype(np.float32)
            inputs["mask"] = mask
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = mask
        data.append(Datum(tuple(chance.integers(0, VOCAB, length).tolist()), inputs))
    return data


@pytest.mark.parametrize("columns", [None, 1, 3])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_losses_match_plain_torch(both: Both, loss_fn: str, columns: int | None) -> None:
    data = batch(loss_fn, columns)
    result, own = both.run(data, loss_fn, CONFIGS.get(loss_fn, {}))
    logprobs, loss, grads = both.expected(data, loss_fn)
    for found, theirs, datum in zip(result.logprobs, logprobs, data, strict=True):
        assert found.shape == datum.inputs["target_tokens"].shape
        assert np.abs(found - theirs).max() < 2e-5
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=1e-4)
    assert own.keys() == grads.keys()
    for name, grad in own.items():
        assert grad is not None
        assert (grad - grads[name]).norm() < 1e-4 * grads[name].norm(), name


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_padding_with_zero_weight_changes_no_bit(both: Both, loss_fn: str) -> None:
    """Change targets and sampler logprobs at zero weight: only their reported logprobs change."""
    data = batch(loss_fn, None)
    others = []
    for datum in data:
        inputs = {name: each.copy() for name, each in datum.inputs.items()}
        half = len(datum.tokens) // 2
        inputs["target_tokens"][:half] = datum.tokens[1 : half + 1]
        if "logprobs" in inputs:
            inputs["logprobs"][:half] = -1e4  # exp(p - q) is infinite
        others.append(Datum(datum.tokens, inputs))
    first, own = both.run(data, loss_fn, {})
    second, again = both.run(others, loss_fn, {})
    assert first.loss == second.loss
    for name, grad in own.items():
        assert torch.equal(grad, again[name]), name
    for datum, one, two in zip(data, first.logprobs, second.logprobs, strict=True):
        half = len(datum.tokens) // 2
        assert (one[half:] == two[half:]).all()
        assert (one[:half] != two[:half]).all()


def test_factors_multiply_their_targets_share(both: Both) -> None:
    (datum, *_) = batch("importance_sampling", None)
    weights = np.linspace(0, 2, len(datum.tokens), dtype=np.float32)
    weighted = Datum(datum.tokens, {**datum.inputs, "weights": weights})
    result, own = both.run([weighted], "importance_sampling", {})
    _, loss, grads = both.expected([weighted], "importance_sampling")
    assert result.loss == pytest.approx(loss, rel=1e-5)
    for name, grad in own.items():
        assert (grad - grads[name]).norm() < 1e-4 * grads[name].norm(), name


def test_thresholds_of_each_target_come_before_those_of_all(both: Both) -> None:
    data = batch("ppo", None)
    wide, narrow = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}, (0.9, 1.1)
    names = ("clip_low_threshold", "clip_high_threshold")
    own = [
        Datum(
            datum.tokens,
            {
                **datum.inputs,
                **{
                    name: np.full(len(datum.tokens), value, np.float32)
                    for name, value in zip(names, narrow, strict=True)
                },
            },
        )
        for datum in data
    ]
    expected, _ = both.run(data, "ppo", dict(zip(names, narrow, strict=True)))
    found, _ = both.run(own, "ppo", {**wide})
    other, _ = both.run(data, "ppo", {**wide})
    assert found.loss == expected.loss != other.loss


@pytest.mark.parametrize(
    ("change", "loss_fn", "words"),
    [
        ({"target_tokens": np.zeros((7, 0), np.int64)}, "cross_entropy", "of shape \\[7, 0\\]"),
        ({"target_tokens": np.zeros(6, np.int64)}, "cross_entropy", "7 input tokens"),
        ({"target_tokens": np.zeros(7, np.float32)}, "cross_entropy", "int64"),
        ({"target_tokens": np.full(7, VOCAB)}, "cross_entropy", "outside \\[0, 259\\)"),
        ({"weights": np.ones((7, 2), np.float32)}, "cross_entropy", "of shape \\[7\\]"),
        ({"target_tokens": np.zeros((7, 2), np.int64)}, "cross_entropy", "of shape \\[7, 2\\]"),
        ({"target_tokens": np.zeros((7, 300), np.int64)}, "cross_entropy", "max_request_tokens"),
        ({"sequence_ratio_mask": np.zeros(7, np.float32)}, "gspo", "mark at least one token"),
        ({"sequence_ratio_mask": None}, "gspo", "lacks the input 'sequence_ratio_mask'"),
    ],
)
def test_targets_that_do_not_fit_are_rejected(
    both: Both, change: dict[str, Any], loss_fn: str, words: str
) -> None:
    (datum, *_) = batch(loss_fn, None)
    inputs = {name: each for name, each in {**datum.inputs, **change}.items() if each is not None}
    with pytest.raises(Refused, match=words):
        both.run([Datum(datum.tokens, inputs)], loss_fn, {})
