"""The sampling head over ranks with vocabulary shards: the bits of one rank for all options."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import SamplingParams
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.interface import Ops
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.parallel.head import ShardedHead
from nano_inference.sampling.logit_scale import UNSCALED, LogitScale
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch
from tests.depth import at_depth
from tests.ops.compiler import NEEDS_COMPILER
from tests.ops.test_cpu_head import random_requests
from tests.parallel.test_tensor_parallel import on_ranks, require_same
from tests.parallel.thread_group import ThreadGroup

HIDDEN, ROWS, UNIT = 24, 5, 1536
PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "mixed": {},
    "top": {"top_logprobs": 3},
    "named": {"named": True},
}
BACKENDS = ["reference", pytest.param("cpu", marks=NEEDS_COMPILER)]


def backend(name: str) -> Ops:
    return reference_ops() if name == "reference" else cpu_ops(1)


class Ranks:
    """A head on one rank, and a sharded head on several."""

    def __init__(self, ops: Ops, weight: Tensor, bounds: tuple[int, ...]) -> None:
        self.ops, self.size = ops, len(bounds) - 1
        self.whole = self._stored(weight)
        self.own = [self._stored(weight[first:end]) for first, end in pairwise(bounds)]
        self.told: list[int] = []  # bytes sent by rank 0, per exchange
        groups = ThreadGroup.make(self.size, patience=20)
        setattr(groups[0], "all_gather", self._noted(groups[0].all_gather))  # noqa: B010
        self.heads = [ShardedHead(ops, group, bounds) for group in groups]

    def check(self, call: Callable[[Any, Any], Any]) -> Any:
        """Check that `call(head, weight)` returns the same on all ranks and on one."""
        expected = call(self.ops, self.whole)
        for got in on_ranks(self.size, lambda rank: call(self.heads[rank], self.own[rank])):
            require_same(got, expected)
        return expected

    def _stored(self, tensor: Tensor) -> Any:
        stored: Any = self.ops.allocate(tuple(tensor.shape), tensor.dtype, tensor.device)
        stored.copy_(tensor) if isinstance(stored, Tensor) else stored.write(0, tensor)
        return stored

    def _noted(self, gather: Callable[[Tensor], list[Tensor]]) -> Callable[[Tensor], list[Tensor]]:
        def noted(x: Tensor) -> list[Tensor]:
            self.told.append(x.numel() * x.element_size())
            return gather(x)

        return noted


def bounds_of(vocab: int, ranks: int) -> tuple[int, ...]:
    units = -(-vocab // UNIT)
    return tuple(min(units * rank // ranks * UNIT, vocab) for rank in range(ranks + 1))


def random_head(vocab: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(ROWS, HIDDEN, generator=generator),
        torch.randn(vocab, HIDDEN, generator=generator),
    )
    return hidden.to(dtype), (weight * (3 / math.sqrt(HIDDEN))).to(dtype)


def draw(
    hidden: Tensor, batch: SamplingBatch, scale: LogitScale = UNSCALED
) -> Callable[[Any, Any], Any]:
    return lambda head, weight: head.sample(hidden, weight, scale, batch)


@pytest.mark.thorough(cases=["reference"])
@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=at_depth(8), deadline=None)
@given(
    ranks=st.sampled_from([2, 4, 8]),
    kind=st.sampled_from([*KINDS]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    more=st.sampled_from([0, 1, 100, 2000]),
    masks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_head_on_ranks_samples_and_scores_like_one(
    name: str, ranks: int, kind: str, dtype: torch.dtype, more: int, masks: bool, seed: int
) -> None:
    vocab = ranks * UNIT + more
    hidden, weight = random_head(vocab, dtype, seed)
    requests = random_requests(random.Random(seed), 12, ROWS, vocab, **KINDS[kind])
    batch = replace(sampling_batch(requests), any_kept=masks)
    ranked = Ranks(backend(name), weight, bounds_of(vocab, ranks))
    ranked.check(draw(hidden, batch, LogitScale(1.5, 4.0)))
    token_ids = torch.tensor([0, vocab - 1, vocab // 2, UNIT - 1, UNIT])
    temperatures = torch.tensor([1.0, 0.3, 1e-40, 2.5, 1.0], dtype=torch.float64)
    ranked.check(
        lambda head, own: head.gather_logprobs(
            hidden, own, LogitScale(1.5, 4.0), token_ids, temperatures
        )
    )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "bounds", [(0, 100, 200, 300, 301), (0, 0, 512, 513), (0, 384, 700), (0, 512, 700)], ids=str
)
def test_head_shards_need_not_align_to_blocks(name: str, bounds: tuple[int, ...]) -> None:
    hidden, weight = random_head(bounds[-1], torch.float32, 3)
    ranked = Ranks(backend(name), weight, bounds)
    for kind in KINDS.values():
        ranked.check(
            draw(
                hidden,
                sampling_batch(random_requests(random.Random(5), 12, ROWS, bounds[-1], **kind)),
            )
        )
    targets, temperatures = (
        torch.tensor([0, 99, 100, 299, 300]),
        torch.full((ROWS,), 0.8, dtype=torch.float64),
    )
    ranked.check(
        lambda head, own: head.gather_logprobs(hidden, own, UNSCALED, targets, temperatures)
    )
    ranked.check(lambda head, own: head.logits(hidden, own, LogitScale(3.0)))


@pytest.mark.parametrize("name", BACKENDS)
def test_equal_logits_favor_the_lower_id(name: str) -> None:
    """The two halves of the vocabulary are equal, so every token has a twin on the other rank."""
    hidden, half = random_head(UNIT, torch.float32, 1)
    ranked = Ranks(backend(name), torch.cat([half, half]), (0, UNIT, 2 * UNIT))
    batch = sampling_batch([DrawRequest(SamplingParams(temperature=0), row) for row in range(ROWS)])
    drawn = ranked.check(draw(hidden, batch))
    assert int(drawn.token_ids.max()) < UNIT


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_row_is_reported(name: str, value: float) -> None:
    hidden, weight = random_head(2 * UNIT, torch.float32, 2)
    hidden[1] = 0
    hidden[1, 0], hidden[3, 0] = 1.0, value
    weight[UNIT + 5, 0] = value
    params = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(raw_logprobs=True, temperature=0.5),
    ]
    batch = sampling_batch(
        [DrawRequest(each, row, (1, row, 2)) for row in range(ROWS) for each in params]
    )
    Ranks(backend(name), weight, (0, UNIT, 2 * UNIT)).check(draw(hidden, batch))


@pytest.mark.parametrize("name", BACKENDS)
def test_head_traffic_is_bounded(name: str) -> None:
    """A plain draw sends maxima, sums and best tokens. Only rows that need all logits send them."""
    vocab, hidden = 8 * UNIT, random_head(8, torch.float32, 0)[0]
    ranked = Ranks(backend(name), random_head(vocab, torch.float32, 0)[1], bounds_of(vocab, 8))
    plain = [DrawRequest(SamplingParams(), row, (1, row, 2)) for row in range(ROWS)]
    ranked.check(draw(hidden, sampling_batch(plain)))
    assert sum(ranked.told) < ROWS * 256
    ranked.told.clear()
    cut = DrawRequest(SamplingParams(top_k=3), 4, (1, 9, 2))
    ranked.check(draw(hidden, sampling_batch([*plain, cut])))
    assert sum(ranked.told) < ROWS * 256 + UNIT * 4 + 1
    ranked.check(draw(hidden, sampling_batch([])))


@pytest.mark.parametrize("name", BACKENDS)
def test_unsupported_params_are_rejected_before_any_traffic(name: str) -> None:
    hidden, weight = random_head(2 * UNIT, torch.float32, 0)
    ranked = Ranks(backend(name), weight, (0, UNIT, 2 * UNIT))
    bad = sampling_batch([DrawRequest(SamplingParams(), ROWS)])
    for head, shard in zip(ranked.heads, ranked.own, strict=True):
        with pytest.raises(IndexError):
            head.sample(hidden, shard, UNSCALED, bad)
    assert not ranked.told
