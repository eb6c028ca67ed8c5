"""The draw of the CUDA backend in Triton's interpreter, compared with torch's reference and bitwise
with itself.
"""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nano_inference import SamplingParams
from nano_inference.sampling import sample as reference
from nano_inference.sampling.exponential_noise import exponential_noise
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, greedy_batch, sampling_batch
from tests.depth import at_depth
from tests.ops.test_cpu_head import random_requests, same_bits

pytest.importorskip("triton")

import triton
import triton.language as tl

from nano_inference.ops.cuda import noise, sampling
from nano_inference.ops.cuda.softmax import BLOCK

CALM = settings(deadline=None, max_examples=at_depth(4))
VOCABULARIES = [1, 37, 300, BLOCK + 1]
PLAIN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PARTS = ("logprobs", "raw_logprobs", "log_kept_mass", "top_logprobs")


def rows(num: int, vocab: int, seed: int = 0, scale: float = 3) -> Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def raw(requests: list[DrawRequest]) -> SamplingBatch:
    return replace(sampling_batch(requests), any_raw=True)


def assert_agree(drawn: Draw, expected: Draw) -> None:
    assert torch.equal(drawn.token_ids, expected.token_ids)
    assert torch.equal(drawn.top_ids, expected.top_ids)
    for name in PARTS:
        torch.testing.assert_close(
            getattr(drawn, name), getattr(expected, name), rtol=1e-5, atol=1e-5
        )
    torch.testing.assert_close(
        drawn.named_logprobs, expected.named_logprobs, rtol=1e-5, atol=1e-5, equal_nan=True
    )
    assert (drawn.kept is None) == (expected.kept is None)
    if drawn.kept is not None and expected.kept is not None:
        assert torch.equal(drawn.kept, expected.kept)


# -- the noise -------------------------------------------------------------------------------------


@triton.jit
def _noise_kernel(keys, bits, out, SIZE: tl.constexpr):  # noqa: N803
    sample, ids = tl.program_id(0), tl.arange(0, SIZE)
    low, high = noise.key_halves(keys, sample)
    mixed = noise.mix32(noise.mix32(noise.mix32(ids.to(tl.uint32)) ^ low) ^ high)
    tl.store(bits + sample * SIZE + ids, mixed.to(tl.int64))
    tl.store(out + sample * SIZE + ids, noise.exponential(ids, low, high))


def mixed(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x = x * 0xD35A2D97 % 2**32
    return x ^ (x >> 15)


def test_noise_equals_the_reference() -> None:
    size, keys = 64, torch.randint(0, 2**32, (40, 2), generator=torch.Generator().manual_seed(1))
    keys[:4] = torch.tensor([[0, 0], [2**32 - 1, 2**31], [2**31 - 1, 2**32 - 1], [1, 0]])
    bits, drawn = torch.empty(40, size, dtype=torch.int64), torch.empty(40, size)
    _noise_kernel[40,](keys, bits, drawn, SIZE=size)
    assert bits.tolist() == [
        [mixed(mixed(mixed(i) ^ low) ^ high) for i in range(size)] for low, high in keys.tolist()
    ]
    expected = exponential_noise(keys, size)
    small = expected < 2.0**-6
    assert bool(small.any())
    assert torch.equal(drawn[small], expected[small]), "the series must use only sums and products"
    torch.testing.assert_close(drawn, expected, rtol=1e-6, atol=0)


def test_smallest_noise_wins_among_equal_tokens() -> None:
    vocab, num = BLOCK + 40, 24
    batch = sampling_batch([DrawRequest(SamplingParams(), 0, (5, i, 2 * i)) for i in range(num)])
    drawn = sampling.draw(torch.full((1, vocab), -7.5), batch)
    assert torch.equal(drawn.token_ids, exponential_noise(batch.noise_keys, vocab).argmin(dim=-1))
    assert drawn.logprobs.tolist() == pytest.approx([-math.log(vocab)] * num, abs=1e-6)


# -- against the reference -------------------------------------------------------------------------


@pytest.mark.thorough
@CALM
@given(seed=st.integers(0, 2**20), vocab=st.sampled_from(VOCABULARIES))
def test_same_draws_as_the_reference(seed: int, vocab: int) -> None:
    """Temperatures, bias, allowed tokens, penalties, raw logprobs, best tokens."""
    requests = random_requests(
        random.Random(seed), 8, 3, vocab, top_logprobs=min(4, vocab), **PLAIN
    )
    logits = rows(3, vocab, seed)
    assert_agree(sampling.draw(logits, raw(requests)), reference.sample(logits, raw(requests)))


@pytest.mark.thorough
def test_samples_share_rows_and_blocks_are_weighed() -> None:
    """Draw over two blocks, the second as improbable as its logits say."""
    logits = rows(3, BLOCK + 700, scale=1.0)
    logits[:, BLOCK:] -= 3
    requests = [
        DrawRequest(SamplingParams(temperature=(1.0, 0.5)[i % 2]), i % 3, (9, i, 4))
        for i in range(12)
    ]
    assert_agree(sampling.draw(logits, raw(requests)), reference.sample(logits, raw(requests)))


def test_penalties_distinguish_prompt_and_completion() -> None:
    """Tokens of the prompt count as repeated, but not as present."""
    options: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "presence_penalty": 2.0,
        "frequency_penalty": 0.5,
    }
    requests = [
        DrawRequest(SamplingParams(**options), 0, (3, i, 0), [0, 1, 2], [2, 3, 3]) for i in range(4)
    ]
    logits = rows(1, 6)
    assert_agree(sampling.draw(logits, raw(requests)), reference.sample(logits, raw(requests)))


@pytest.mark.thorough(cases=["2049"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_greedy_tie_takes_the_lowest_id(vocab: int) -> None:
    logits = torch.zeros(2, vocab)
    logits[1, : vocab // 2] = -1
    drawn = sampling.draw(logits, greedy_batch(2, most_top=min(vocab, 5)))
    assert drawn.token_ids.tolist() == [0, vocab // 2]
    assert_agree(drawn, reference.sample(logits, greedy_batch(2, most_top=min(vocab, 5))))


def test_best_tokens_break_ties_by_lowest_id_with_equal_zeros() -> None:
    logits = torch.tensor([[-1.0, 0.0, -0.0, 0.0, -0.0, 2.0, -math.inf, -math.inf, -1.0]])
    for temperature in (0.0, 1.0, 0.7):
        batch = sampling_batch(
            [DrawRequest(SamplingParams(temperature=temperature, top_logprobs=9))]
        )
        drawn = sampling.draw(logits, batch)
        assert drawn.top_ids.tolist() == [[5, 1, 2, 3, 4, 0, 8, 6, 7]]
        assert_agree(drawn, reference.sample(logits, batch))


@pytest.mark.thorough
def test_draw_of_more_samples_than_one_ranking_pass() -> None:
    requests = [
        DrawRequest(SamplingParams(top_logprobs=2, temperature=i % 2), i % 5, (1, i, 0))
        for i in range(19)
    ]
    logits = rows(5, 50)
    assert_agree(sampling.draw(logits, raw(requests)), reference.sample(logits, raw(requests)))


@pytest.mark.thorough(cases=["options0-0.02"])
@pytest.mark.parametrize("temperature", [0.02, 0.7, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 1}])
def test_kept_mass_of_a_mask_may_be_tiny(temperature: float, options: dict[str, Any]) -> None:
    logits = rows(1, 900)
    allowed = [3, 100, 831]
    logits[0, allowed] = torch.tensor([-300.0, -301.0, -299.5])
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=frozenset(allowed), **options
    )
    batch = sampling_batch([DrawRequest(params, 0, (1, 0, i), banned=[100]) for i in range(8)])
    drawn = sampling.draw(logits, batch)
    full = torch.log_softmax(logits[0].double() / temperature, dim=-1)[drawn.token_ids]
    torch.testing.assert_close(
        (drawn.logprobs + drawn.log_kept_mass).double(), full, rtol=1e-6, atol=1e-4
    )
    logits[0, 5] = math.nan  # an invalid distribution is reported, because it cannot be sampled
    assert bool(sampling.draw(logits, batch).logprobs.isnan().all())


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.thorough
@CALM
@given(seed=st.integers(0, 2**20), vocab=st.sampled_from(VOCABULARIES), data=st.data())
def test_sample_has_same_bits_in_any_batch(seed: int, vocab: int, data: st.DataObject) -> None:
    requests = random_requests(random.Random(seed), 6, 3, vocab, named=True)
    logits = rows(3, vocab, seed)
    together = sampling.draw(logits, raw(requests))
    order = data.draw(st.permutations(range(6)))
    assert same_bits(
        together, sampling.draw(logits, raw([requests[i] for i in order])), list(order)
    )
    for i in (0, 3):
        row = logits[requests[i].row : requests[i].row + 1]
        assert same_bits(together, sampling.draw(row, raw([requests[i]._replace(row=0)])), [i])


@pytest.mark.thorough
@CALM
@given(seed=st.integers(0, 2**20), vocab=st.sampled_from(VOCABULARIES))
def test_logprobs_of_a_row_agree_bitwise(seed: int, vocab: int) -> None:
    """The rows are plain at temperature 1, greedy, raw with other options, best tokens,
    and scores.
    """
    logits = rows(1, vocab, seed)
    others = [
        {"temperature": 0.0},
        {"temperature": 0.4},
        {"top_k": 3},
        {"logit_bias": {0: 2.0}},
        {"top_p": 0.5},
    ]
    requests = [DrawRequest(SamplingParams(), 0, (seed, 0, i)) for i in range(5)]
    requests += [
        DrawRequest(SamplingParams(**other), 0, (seed, 1, i)) for i, other in enumerate(others)
    ]
    drawn = sampling.draw(logits, raw(requests))
    assert torch.equal(drawn.logprobs[:6], drawn.raw_logprobs[:6])
    ones = torch.ones(len(requests), dtype=torch.float64)
    assert torch.equal(
        sampling.score(logits.expand(len(requests), -1), drawn.token_ids, ones), drawn.raw_logprobs
    )
    best = [
        DrawRequest(SamplingParams(top_logprobs=min(vocab, 6), temperature=float(t)), 0)
        for t in (0, 1)
    ]
    shown = sampling.draw(logits, sampling_batch(best))
    for ids, logprobs in zip(shown.top_ids, shown.top_logprobs, strict=True):
        assert torch.equal(
            sampling.score(logits.expand(len(ids), -1), ids, torch.ones(len(ids))), logprobs
        )


def test_score_at_a_temperature_equals_the_plain_logprob() -> None:
    temperatures = [0.6, 1.0, 1e-3, 0.6, 1e-45, 1e30, 1e300, 2.5]
    logits = rows(len(temperatures), 700)
    requests = [
        DrawRequest(SamplingParams(temperature=t), i, (1, 2, i)) for i, t in enumerate(temperatures)
    ]
    drawn = sampling.draw(logits, sampling_batch(requests))
    wanted = torch.tensor(temperatures, dtype=torch.float64)
    assert torch.equal(sampling.score(logits, drawn.token_ids, wanted), drawn.logprobs)
    assert_agree(drawn, reference.sample(logits, sampling_batch(requests)))


def test_rows_at_any_address_and_stride_give_the_same_bits() -> None:
    vocab = 333
    logits = rows(3, vocab)
    batch = raw([DrawRequest(SamplingParams(), i, (1, 1, i)) for i in range(3)])
    drawn = sampling.draw(logits, batch)
    shifted = torch.cat([torch.zeros(1), logits.flatten()])[1:].view(3, vocab)
    assert shifted.data_ptr() % 16 != 0
    wide = torch.zeros(3, vocab + 7)
    wide[:, :vocab] = logits
    assert same_bits(drawn, sampling.draw(shifted, batch))
    assert same_bits(drawn, sampling.draw(wide[:, :vocab], batch))


# -- no waits for the device -----------------------------------------------------------------------


class NoHostReads(TorchDispatchMode):
    """Raises if an operation reads a value, which on a GPU would block and cannot be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")
        assert func.overloadpacket.__name__ not in waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_draw_does_not_wait_for_the_device() -> None:
    requests = random_requests(random.Random(3), 5, 3, 60, top_logprobs=2)
    batch, logits = replace(raw(requests), any_kept=True, any_filter=True), rows(3, 60)
    with NoHostReads():
        sampling.draw(logits, batch)
        sampling.score(logits, torch.arange(3), torch.ones(3))
    with pytest.raises(AssertionError, match="waits"), NoHostReads():
        reference.sample(logits, batch)


# -- extremes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"logit_bias": {3: 1.0}}]
)
def test_broken_row_is_reported_without_affecting_others(
    poison: float, options: dict[str, Any]
) -> None:
    logits = rows(3, 200)
    batch = raw(
        [DrawRequest(SamplingParams(top_logprobs=2, **options), i, (1, 1, i)) for i in range(3)]
    )
    clean = sampling.draw(logits, batch)
    for token in (0, 199):
        broken = logits.clone()
        broken[1, token] = poison
        drawn = sampling.draw(broken, batch)
        assert drawn.token_ids[1] == 0
        assert drawn.logprobs[1].isnan()
        assert not drawn.top_logprobs[1].isfinite().any()
        assert same_bits(
            clean, replace(drawn, **{f: getattr(drawn, f)[[0, 2]] for f in FIELDS}), [0, 2]
        )


FIELDS = ("token_ids", "logprobs", "raw_logprobs", "log_kept_mass", "top_ids", "top_logprobs")


@pytest.mark.parametrize("whole", [math.nan, -math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}]
)
def test_row_without_candidates_is_reported(whole: float, options: dict[str, Any]) -> None:
    drawn = sampling.draw(torch.full((1, 50), whole), raw([DrawRequest(SamplingParams(**options))]))
    assert drawn.token_ids.tolist() == [0]
    assert drawn.logprobs.isnan().all()


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-3, 1.0, 1e30, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}])
def test_single_remaining_token_is_drawn_with_certainty(
    temperature: float, filters: dict[str, Any]
) -> None:
    logits = torch.full((1, 900), -math.inf)
    logits[0, 777] = -3e5
    batch = sampling_batch(
        [DrawRequest(SamplingParams(temperature=temperature, **filters), 0, (2, 2, 2))]
    )
    drawn = sampling.draw(logits, batch)
    assert drawn.token_ids.tolist() == [777]
    assert drawn.logprobs.tolist() == drawn.log_kept_mass.tolist() == [0.0]


def test_low_temperature_keeps_precision_without_overflow() -> None:
    logits = torch.tensor([[1000.0, 1000.0 + 2**-13, 3e38, -3e38, 3e38]])
    batch = sampling_batch(
        [DrawRequest(SamplingParams(temperature=t), 0, (1, 1, 1)) for t in (1e-30, 1.0, 1e37)]
    )
    drawn = sampling.draw(logits, batch)
    assert_agree(drawn, reference.sample(logits, batch))
    assert bool(drawn.logprobs.isfinite().all())


def test_empty_batch_draws_nothing() -> None:
    for options in ({}, {"any_filter": True, "any_kept": True, "most_top": 3}):
        drawn = sampling.draw(torch.empty(0, 100), replace(sampling_batch([]), **options))
        assert drawn.token_ids.shape == drawn.logprobs.shape == (0,)
        assert drawn.kept is None or drawn.kept.shape == (0, 100)
    assert sampling.score(
        torch.empty(0, 100), torch.empty(0, dtype=torch.int64), torch.empty(0)
    ).shape == (0,)


def test_logits_must_be_float32_and_out_of_range_score_is_nan() -> None:
    with pytest.raises(ValueError, match="float32"):
        sampling.draw(rows(1, 100).half(), sampling_batch([DrawRequest(SamplingParams())]))
    with pytest.raises(ValueError, match="float32"):
        sampling.score(rows(1, 100)[0], torch.zeros(1, dtype=torch.int64), torch.ones(1))
    assert sampling.score(rows(2, 100), torch.tensor([100, -1]), torch.ones(2)).isnan().all()
