"""The end of a step: draws and scores from logits.

A draw is two launches: every block of the vocabulary is reduced to a few numbers
(`_reduce_kernel`), and these to a token and its logprobs (`_finish_kernel`). Bias and penalties
come before them in `edits`, masks in `masks`, filters between them in `filters`, the best tokens
after them in `best`. Nothing waits for the device, and all can be captured in a graph.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda import filters, masks
from nano_inference.ops.cuda.best import best_tokens
from nano_inference.ops.cuda.edits import edited
from nano_inference.ops.cuda.noise import exponential, key_halves
from nano_inference.ops.cuda.softmax import (
    BLOCK,
    HIGHEST,
    as_rows,
    block_odds,
    divisor_of,
    finite_or_zero,
    is_sound,
    merge_blocks,
    num_blocks,
    slope_of,
)
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import SamplingBatch

# Of a block: of the logits that are drawn from, and of the model's own where they are others.
_PARTS = 5
_MAXIMUM, _SUM, _RACE, _OWN_MAXIMUM, _OWN_SUM = (tl.constexpr(i) for i in range(_PARTS))
# Read one number at a time: another alignment would be another kernel to compile.
_SCALARS = [
    *("rows", "temperatures", "filter_tokens", "filter_log_sums", "filter_mass", "masked"),
    *("token_ids", "logprobs", "raw_logprobs", "log_kept_mass", "shown"),
]


def draw(logits: Tensor, batch: SamplingBatch) -> Draw:
    """Draw one token for each sample from float32 logits [L, V]; `Ops.sample_logits`.

    A row that holds NaN or +inf, or nothing but -inf, gives token 0 and a logprob that is NaN.

    Raises:
        ValueError: `logits` are not float32 [L, V].
    """
    own = as_rows(logits)
    num, vocab, device = len(batch), own.shape[1], own.device
    token_ids = torch.empty(num, dtype=torch.int64, device=device)
    logprobs, raw, mass = torch.empty((3, num), device=device).unbind()
    shown = torch.empty((2, num), device=device)
    num_top = min(batch.most_top, vocab)
    wants_mask = batch.any_filter and batch.any_mask
    kept = torch.empty((num, vocab), dtype=torch.bool, device=device) if wants_mask else None
    top_ids = torch.empty((num, num_top), dtype=torch.int64, device=device)
    result = Draw(
        token_ids, logprobs, raw, mass, kept, top_ids, torch.empty(top_ids.shape, device=device)
    )
    if num == 0:
        return result
    changed = edited(own, batch)
    source = own if changed is None else changed
    uncut = masks.cut(source, batch) if batch.masks else None
    blocks = num_blocks(vocab)
    parts = torch.empty((_PARTS, num, blocks), device=device)
    winners = torch.empty((2, num, blocks), dtype=torch.int32, device=device)
    flags = {"CHANGED": changed is not None, "RAW": batch.any_raw or batch.any_greedy}
    sizes = {"V": vocab, "BLOCKS": blocks}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    _reduce_kernel[num, blocks](
        source, own, batch.rows, batch.temperature, batch.noise_keys, parts, winners, num,
        **sizes, **flags, BLOCK=BLOCK, RACE=True, GREEDY=batch.any_greedy, **options,
    )  # fmt: skip
    filtered = None
    if batch.any_filter:
        filtered = filters.apply(source, parts[_MAXIMUM.value], batch, changed is not None)
    _finish_kernel[num,](
        source, own, batch.rows, batch.temperature, parts, winners,
        *(
            (filtered.token_ids, filtered.log_sums, filtered.mass)
            if filtered
            else (winners, parts, parts)
        ),
        *(uncut or (winners, parts)),
        token_ids, logprobs, raw, mass, shown, num,
        **sizes, **flags, WIDTH=triton.next_power_of_2(blocks), GREEDY=batch.any_greedy,
        FILTERED=filtered is not None, MASKED=uncut is not None, **options,
    )  # fmt: skip
    if filtered is not None and kept is not None:
        filters.write_mask(
            kept, filtered, source, parts[_MAXIMUM.value], batch, changed is not None
        )
    if num_top:
        best_tokens(
            result, shown, parts[_MAXIMUM.value], source, own, batch, filtered, changed is not None
        )
    return result


def score(logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> Tensor:
    """Logprobs of given tokens [L] from logits [L, V], softmax(logits / temperature): to the bit
    those of `draw`.

    Temperatures are above 0. A token that is not in the vocabulary scores NaN.

    Raises:
        ValueError: `logits` are not float32 [L, V].
    """
    logits = as_rows(logits)
    num, vocab = logits.shape
    out = torch.empty(num, device=logits.device)
    if num == 0:
        return out
    blocks = num_blocks(vocab)
    parts = torch.empty((_PARTS, num, blocks), device=logits.device)
    token_ids, temperatures = token_ids.contiguous(), temperatures.contiguous()
    sizes = {"V": vocab, "BLOCKS": blocks, "num_warps": 4, "enable_fp_fusion": False}
    _reduce_kernel[num, blocks](
        logits, logits, token_ids, temperatures, token_ids, parts, parts, num,
        **sizes, BLOCK=BLOCK, CHANGED=True, RAW=False, RACE=False, GREEDY=False,
    )  # fmt: skip
    width = triton.next_power_of_2(blocks)
    _score_kernel[num,](logits, token_ids, temperatures, parts, out, num, **sizes, WIDTH=width)
    return out


@triton.jit(
    do_not_specialize=["num"], do_not_specialize_on_alignment=["rows", "temperatures", "keys"]
)
def _reduce_kernel(
    logits,  # float32 [L, V], or [R, V] of their own where CHANGED
    own,  # float32 [L, V], the model's
    rows,  # int64 [R]
    temperatures,  # float64 [R]
    keys,  # int64 [R, 2]
    parts,  # float32 [_PARTS, R, BLOCKS], written
    winners,  # int32 [2, R, BLOCKS]: of the race, and the most probable; written
    num,  # R
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANGED: tl.constexpr,  # sample i has row i of the logits
    RAW: tl.constexpr,  # what the model's own logprobs need
    RACE: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Grid (R, BLOCKS): one block of the vocabulary for one sample."""
    sample, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    row = sample if CHANGED else tl.load(rows + sample)
    x = tl.load(logits + row * V + ids, mask=ids < V, other=-float("inf"))
    divisor, _ = divisor_of(tl.load(temperatures + sample))
    highest, odds = block_odds(x, slope_of(divisor))
    part, size = sample * BLOCKS + block, num.to(tl.int64) * BLOCKS
    tl.store(parts + size * _MAXIMUM + part, highest)
    tl.store(parts + size * _SUM + part, tl.sum(odds, axis=0))
    if RACE:
        low, high = key_halves(keys, sample)
        times = odds / exponential(ids, low, high)
        tl.store(parts + size * _RACE + part, tl.max(times, axis=0))
        tl.store(winners + part, block * BLOCK + tl.argmax(times, axis=0))
    if GREEDY:
        tl.store(winners + size + part, block * BLOCK + tl.argmax(x, axis=0))
    if RAW:
        if CHANGED:
            x = tl.load(own + tl.load(rows + sample) * V + ids, mask=ids < V, other=-float("inf"))
        highest, odds = block_odds(x, slope_of(1.0))
        tl.store(parts + size * _OWN_MAXIMUM + part, highest)
        tl.store(parts + size * _OWN_SUM + part, tl.sum(odds, axis=0))


@triton.jit
def _load_parts(
    parts, part: tl.constexpr, sample, num, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, nothing
):
    """One number of every block of a sample, [WIDTH]."""
    blocks = tl.arange(0, WIDTH)
    start = parts + (num.to(tl.int64) * part + sample) * BLOCKS
    return tl.load(start + blocks, mask=blocks < BLOCKS, other=nothing)


@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=_SCALARS)
def _finish_kernel(
    logits,
    own,
    rows,
    temperatures,
    parts,
    winners,
    filter_tokens,  # int32 [R]: of `filters.Filtered`; -1 where nothing filters
    filter_log_sums,  # float32 [R]
    filter_mass,  # float32 [R]
    masked,  # uint8 [R]: of `masks.Uncut`
    uncut,  # float32 [2, R, BLOCKS]
    token_ids,  # int64 [R], written as all below
    logprobs,  # float32 [R]
    raw_logprobs,  # float32 [R]
    log_kept_mass,  # float32 [R]
    shown,  # float32 [2, R]: maximum and log of the sum of odds of what `best` shows
    num,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,  # BLOCKS, up to a power of 2
    CHANGED: tl.constexpr,
    RAW: tl.constexpr,
    GREEDY: tl.constexpr,
    FILTERED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Grid (R,): the blocks of one sample, merged; the token and what is said of it."""
    sample = tl.program_id(0).to(tl.int64)
    divisor, greedy = divisor_of(tl.load(temperatures + sample))
    maxima = _load_parts(parts, _MAXIMUM, sample, num, BLOCKS, WIDTH, -float("inf"))
    sums = _load_parts(parts, _SUM, sample, num, BLOCKS, WIDTH, 0.0)
    highest, factors, total = merge_blocks(maxima, sums, slope_of(divisor))
    start, size = sample * BLOCKS, num.to(tl.int64) * BLOCKS
    sound = is_sound(total)
    times = tl.where(
        sound, _load_parts(parts, _RACE, sample, num, BLOCKS, WIDTH, 0.0) * factors, 0.0
    )
    token = tl.load(winners + start + tl.argmax(times, axis=0))
    log_sum, mass = tl.log(tl.where(sound, total, 1.0)), 0.0
    log_sum_of_all = log_sum
    if GREEDY:
        token = tl.where(greedy, tl.load(winners + size + start + tl.argmax(maxima, axis=0)), token)
    if FILTERED:
        chosen = tl.load(filter_tokens + sample)
        token = tl.where(chosen >= 0, chosen, token)
        log_sum = tl.where(chosen >= 0, tl.load(filter_log_sums + sample), log_sum)
        mass = tl.where(chosen >= 0, tl.load(filter_mass + sample), mass)
    if MASKED:
        cuts = (tl.load(masked + sample) != 0) & (greedy == 0)
        part = _masked_part(uncut, sample, num, highest, log_sum_of_all, divisor, BLOCKS, WIDTH)
        mass = tl.where(cuts, tl.maximum(tl.minimum(mass + part, 0.0), -HIGHEST), mass)
        sound &= (part == part) | (cuts == 0)
    token = tl.where(sound, token, 0)  # a broken row has no winner that could be trusted
    row = sample if CHANGED else tl.load(rows + sample)
    log_sum = tl.where(sound, log_sum, float("nan"))
    distance = tl.load(logits + row * V + token) - finite_or_zero(highest)
    logprob = tl.div_rn(tl.where(sound, distance, 0.0), divisor) - log_sum
    raw = 0.0
    if RAW:
        if CHANGED:
            maxima = _load_parts(parts, _OWN_MAXIMUM, sample, num, BLOCKS, WIDTH, -float("inf"))
        sums = _load_parts(parts, _OWN_SUM, sample, num, BLOCKS, WIDTH, 0.0)
        raw, own_highest, own_log_sum = _raw_logprob(
            own + tl.load(rows + sample) * V, token, maxima, sums
        )
        logprob = tl.where(greedy, raw, logprob)
        highest = tl.where(greedy, own_highest, highest)
        log_sum = tl.where(greedy, own_log_sum, log_sum)
    tl.store(token_ids + sample, token.to(tl.int64))
    tl.store(logprobs + sample, logprob)
    tl.store(raw_logprobs + sample, raw)
    tl.store(log_kept_mass + sample, mass)
    tl.store(shown + sample, highest)
    tl.store(shown + num + sample, log_sum)


@triton.jit
def _masked_part(
    uncut, sample, num, highest, log_sum, divisor, BLOCKS: tl.constexpr, WIDTH: tl.constexpr
):
    """Log of the part of a row that masks left, from maximum and log of the sum of what is left;
    NaN if the row was not sound. The maxima are subtracted apart: e**-300 is no float32.
    """
    maxima = _load_parts(uncut, 0, sample, num, BLOCKS, WIDTH, -float("inf"))
    sums = _load_parts(uncut, 1, sample, num, BLOCKS, WIDTH, 0.0)
    above, _, total = merge_blocks(maxima, sums, slope_of(divisor))
    sound = is_sound(total)
    below = tl.div_rn(finite_or_zero(highest) - finite_or_zero(above), divisor)
    return tl.where(sound, below + (log_sum - tl.log(tl.where(sound, total, 1.0))), float("nan"))


@triton.jit
def _raw_logprob(row, token, maxima, sums):
    """Logprob of a token under the model's own logits, their maximum, and log of the sum of
    exp(logit - maximum).
    """
    highest, _, total = merge_blocks(maxima, sums, slope_of(1.0))
    sound = is_sound(total)
    log_sum = tl.where(sound, tl.log(tl.where(sound, total, 1.0)), float("nan"))
    distance = tl.load(row + token) - finite_or_zero(highest)
    return tl.where(sound, distance, 0.0) - log_sum, highest, log_sum


@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["token_ids", "temperatures"])
def _score_kernel(
    logits,  # float32 [L, V]
    token_ids,  # int64 [L]
    temperatures,  # [L]
    parts,
    out,  # float32 [L], written
    num,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid (L,): the blocks of one row, merged; the logprob of its token."""
    sample = tl.program_id(0).to(tl.int64)
    divisor, _ = divisor_of(tl.load(temperatures + sample))
    maxima = _load_parts(parts, _MAXIMUM, sample, num, BLOCKS, WIDTH, -float("inf"))
    sums = _load_parts(parts, _SUM, sample, num, BLOCKS, WIDTH, 0.0)
    highest, _, total = merge_blocks(maxima, sums, slope_of(divisor))
    sound = is_sound(total)
    token = tl.load(token_ids + sample)
    x = tl.load(logits + sample * V + token, mask=(token >= 0) & (token < V), other=float("nan"))
    distance = tl.where(sound, x - finite_or_zero(highest), float("nan"))
    tl.store(out + sample, tl.div_rn(distance, divisor) - tl.log(tl.where(sound, total, 1.0)))
