"""The end of a step: draws and scores from logits.

A draw takes two launches. `_reduce_kernel` reduces every block of the vocabulary to a few numbers,
and `_finish_kernel` turns these into a token and its logprobs. Bias, penalties and masks run before
them, filters (`filters`) between them, and the best tokens after them. Nothing waits for the
device, and all launches can be captured in a graph.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda import filters
from nano_inference.ops.cuda.filters import CUT, Filtered, asks, distance_of, keeps, row_maximum
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
from nano_inference.sampling.columns import Entries
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import SamplingBatch, masked_samples

# Numbers per block: of the logits that are drawn from, and of the model's own if they differ.
_PARTS = 5
_MAXIMUM, _SUM, _RACE, _OWN_MAXIMUM, _OWN_SUM = (tl.constexpr(i) for i in range(_PARTS))
# Read one number at a time: specializing on their alignment would compile more kernels.
_SCALARS = [
    *("rows", "temperatures", "filter_tokens", "filter_log_sums", "filter_mass", "masked"),
    *("token_ids", "logprobs", "raw_logprobs", "log_kept_mass", "shown"),
]


def draw(logits: Tensor, batch: SamplingBatch) -> Draw:
    """Draw one token for each sample from float32 logits [L, V], as `Ops.sample_logits`.

    A row that contains NaN or +inf, or only -inf, yields token 0 and a logprob of NaN.

    Raises:
        ValueError: `logits` are not float32 [L, V].
    """
    model_logits = as_rows(logits)
    num, vocab, device = len(batch), model_logits.shape[1], model_logits.device
    token_ids = torch.empty(num, dtype=torch.int64, device=device)
    logprobs, raw, mass = torch.empty((3, num), device=device).unbind()
    shown = torch.empty((4, num), device=device)
    named = torch.empty((len(batch.named.ids), 2), device=device)
    num_top = min(batch.most_top, vocab)
    wants_mask = batch.any_filter and batch.any_kept
    kept = torch.empty((num, vocab), dtype=torch.bool, device=device) if wants_mask else None
    top_ids = torch.empty((num, num_top), dtype=torch.int64, device=device)
    result = Draw(
        token_ids, logprobs, raw, mass, kept, top_ids,
        torch.empty(top_ids.shape, device=device), named,
    )  # fmt: skip
    if num == 0:
        return result
    changed = edited(model_logits, batch)
    source = model_logits if changed is None else changed
    uncut = cut(source, batch) if batch.has_masks else None
    blocks = num_blocks(vocab)
    parts = torch.empty((_PARTS, num, blocks), device=device)
    winners = torch.empty((2, num, blocks), dtype=torch.int32, device=device)
    flags = {"CHANGED": changed is not None, "RAW": batch.any_raw or batch.any_greedy}
    sizes = {"V": vocab, "BLOCKS": blocks}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    _reduce_kernel[num, blocks](
        source, model_logits, batch.rows, batch.temperature, batch.noise_keys, parts, winners, num,
        **sizes, **flags, BLOCK=BLOCK, RACE=True, GREEDY=batch.any_greedy, **options,
    )  # fmt: skip
    filtered = None
    if batch.any_filter:
        filtered = filters.apply(source, parts[_MAXIMUM.value], batch, changed is not None)
    _finish_kernel[num,](
        source, model_logits, batch.rows, batch.temperature, parts, winners,
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
    if len(named):
        _write_named(named, shown, source, model_logits, batch, filtered, flags)
    if num_top:
        best_tokens(
            result,
            shown,
            parts[_MAXIMUM.value],
            source,
            model_logits,
            batch,
            filtered,
            changed is not None,
        )
    return result


def score(logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> Tensor:
    """Compute logprobs of the given tokens [L] from logits [L, V], softmax(logits / temperature),
    with the bits of `draw`.

    Temperatures are above 0. A token outside the vocabulary scores NaN.

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
    logits,  # float32 [L, V], or edited [R, V] if CHANGED
    own,  # float32 [L, V], the model's own logits
    rows,  # int64 [R]
    temperatures,  # float64 [R]
    keys,  # int64 [R, 2]
    parts,  # float32 [_PARTS, R, BLOCKS], written
    winners,  # int32 [2, R, BLOCKS]: winner of the race, and most probable token, written
    num,  # R
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANGED: tl.constexpr,  # row i of the logits belongs to sample i
    RAW: tl.constexpr,  # also reduce the model's own logits
    RACE: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Reduce one block of the vocabulary for one sample. Grid (R, BLOCKS)."""
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
    """Load one number of every block of a sample, [WIDTH]."""
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
    filter_tokens,  # int32 [R], from `filters.Filtered`, -1 for samples without filters
    filter_log_sums,  # float32 [R]
    filter_mass,  # float32 [R]
    masked,  # uint8 [R], from `Uncut`
    uncut,  # float32 [2, R, BLOCKS]
    token_ids,  # int64 [R], written as all below
    logprobs,  # float32 [R]
    raw_logprobs,  # float32 [R]
    log_kept_mass,  # float32 [R]
    shown,  # float32 [4, R]: maximum and log of the sum of odds that best and named tokens show,
    # then those of the model's own logits if RAW
    num,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,  # BLOCKS, rounded up to a power of 2
    CHANGED: tl.constexpr,
    RAW: tl.constexpr,
    GREEDY: tl.constexpr,
    FILTERED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Merge the blocks of one sample into its token and logprobs. Grid (R,)."""
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
    token = tl.where(sound, token, 0)  # a broken row has no valid winner
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
        tl.store(shown + 2 * num + sample, own_highest)
        tl.store(shown + 3 * num + sample, own_log_sum)
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
    """Return the log of the share of a row that masks keep, or NaN if the row was not sound.
    `highest` and `log_sum` describe the kept part. Maxima are subtracted separately: e**-300 is not
    representable in float32.
    """
    maxima = _load_parts(uncut, 0, sample, num, BLOCKS, WIDTH, -float("inf"))
    sums = _load_parts(uncut, 1, sample, num, BLOCKS, WIDTH, 0.0)
    above, _, total = merge_blocks(maxima, sums, slope_of(divisor))
    sound = is_sound(total)
    below = tl.div_rn(finite_or_zero(highest) - finite_or_zero(above), divisor)
    return tl.where(sound, below + (log_sum - tl.log(tl.where(sound, total, 1.0))), float("nan"))


@triton.jit
def _raw_logprob(row, token, maxima, sums):
    """Return a token's logprob under the model's own logits, their maximum, and log of the sum of
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
    """Merge the blocks of one row, and compute the logprob of its token. Grid (L,)."""
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


_ENTRIES = 256  # entries per program
_BIAS, _COUNT, _BAN = (tl.constexpr(i) for i in range(3))  # kinds of entries
# Read at scattered addresses: specializing on their alignment would compile more kernels.
_ENTRY_SCALARS = ["entry_rows", "entry_ids", "entry_values", "repetition", "frequency", "presence"]


def edited(logits: Tensor, batch: SamplingBatch) -> Tensor | None:
    """Return a separate row for each sample, with bias and penalties: float32 [L, V] -> [R, V].

    None: no row changes, not even by a mask, and rows can be read in place.
    """
    if not (batch.has_masks or len(batch.bias.ids) + len(batch.counts.ids)):
        return None
    num, vocab = len(batch), logits.shape[1]
    changed = torch.empty((num, vocab), device=logits.device)
    _copy_kernel[num, num_blocks(vocab)](
        logits, batch.rows, changed, V=vocab, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
    )
    _edit(batch, changed, batch.bias, _BIAS)
    _edit(batch, changed, batch.counts, _COUNT)
    return changed


class Uncut(NamedTuple):
    """Statistics of rows before masks, for masked samples only. Other entries are undefined."""

    masked: Tensor  # uint8 [R]
    parts: Tensor  # float32 [2, R, blocks]: maximum and sum of every block of the vocabulary


def cut(logits: Tensor, batch: SamplingBatch) -> Uncut:
    """Set the logits of all tokens that masks and bans exclude to -inf.

    Args:
        logits: float32 [R, V], written.
        batch: R samples, some of them masked.
    """
    num, vocab = logits.shape
    blocks = num_blocks(vocab)
    masked = masked_samples(batch).view(torch.uint8)
    parts = torch.empty((2, num, blocks), device=logits.device)
    words = batch.mask_words
    _mask_kernel[num, blocks](
        logits, batch.temperature, masked, batch.mask_rows, words, parts, num, words.shape[1],
        V=vocab, BLOCKS=blocks, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _edit(batch, logits, batch.banned, _BAN)
    return Uncut(masked, parts)


def _edit(
    batch: SamplingBatch, changed: Tensor, entries: Entries[Tensor], what: tl.constexpr
) -> None:
    count, vocab = len(entries.ids), changed.shape[1]
    if not count:
        return
    penalties = (batch.repetition, batch.frequency, batch.presence)
    _edit_kernel[triton.cdiv(count, _ENTRIES),](
        changed, *entries, *penalties, count,
        V=vocab, WHAT=what.value, SIZE=_ENTRIES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _copy_kernel(
    logits,  # float32 [L, V]
    rows,  # int64 [R]
    changed,  # float32 [R, V], written
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a sample's row. Grid (R, blocks of the vocabulary)."""
    sample = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + tl.load(rows + sample) * V + ids, mask=ids < V, other=0.0)
    tl.store(changed + sample * V + ids, x, mask=ids < V)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_ENTRY_SCALARS)
def _edit_kernel(
    changed,  # float32 [R, V], written at the entries, which are distinct
    entry_rows,  # int64 [E]
    entry_ids,  # int64 [E]
    entry_values,  # float32 [E]
    repetition,  # float32 [R]
    frequency,  # float32 [R]
    presence,  # float32 [R]
    count,  # E
    V: tl.constexpr,
    WHAT: tl.constexpr,  # _BIAS adds the value, _COUNT subtracts penalties, _BAN sets -inf
    SIZE: tl.constexpr,
):
    """Apply one part of the entries. Grid (parts of the entries,)."""
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = places < count
    sample = tl.load(entry_rows + places, mask=inside, other=0)
    token = tl.load(entry_ids + places, mask=inside, other=0)
    inside &= (token >= 0) & (token < V)
    value = tl.load(entry_values + places, mask=inside, other=0.0)
    old = tl.load(changed + sample * V + token, mask=inside, other=0.0)
    if WHAT == _COUNT:
        factor = tl.load(repetition + sample, mask=inside, other=1.0)
        new = tl.where(old > 0, tl.div_rn(old, factor), old * factor)
        once = tl.where(value > 0, tl.load(presence + sample, mask=inside, other=0.0), 0.0)
        new -= tl.load(frequency + sample, mask=inside, other=0.0) * value + once
    elif WHAT == _BIAS:
        new = old + value
    else:
        new = tl.full([SIZE], -float("inf"), tl.float32)
    tl.store(changed + sample * V + token, new, mask=inside)


@triton.jit(
    do_not_specialize=["num", "width"],
    do_not_specialize_on_alignment=["temperatures", "masked", "mask_rows", "mask_words"],
)
def _mask_kernel(
    logits,  # float32 [R, V], written at tokens that a mask excludes
    temperatures,  # float64 [R]
    masked,  # uint8 [R]
    mask_rows,  # int64 [R]
    mask_words,  # int32 [M, W]
    parts,  # float32 [2, R, BLOCKS], written for masked samples
    num,  # R
    width,  # W
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce one block to maximum and sum, then set -inf where its mask's bits are 0. Grid (R,
    BLOCKS).
    """
    sample, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(masked + sample) != 0:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + sample * V + ids, mask=ids < V, other=-float("inf"))
        divisor, _ = divisor_of(tl.load(temperatures + sample))
        highest, odds = block_odds(x, slope_of(divisor))
        part, size = sample * BLOCKS + block, num.to(tl.int64) * BLOCKS
        tl.store(parts + part, highest)
        tl.store(parts + size + part, tl.sum(odds, axis=0))
        mask_row = tl.load(mask_rows + sample)
        if mask_row >= 0:
            words = mask_words + mask_row * width + ids // 32
            word = tl.load(words, mask=ids // 32 < width, other=0)
            may = ((word >> (ids % 32)) & 1) != 0
            tl.store(logits + sample * V + ids, tl.where(may, x, -float("inf")), mask=ids < V)


def _write_named(
    named: Tensor,
    shown: Tensor,
    logits: Tensor,
    model_logits: Tensor,
    batch: SamplingBatch,
    filtered: Filtered | None,
    flags: dict[str, bool],
) -> None:
    """Fill in the logprobs of named tokens: float32 [E, 2]. Other arguments are as in
    `best_tokens`, and `flags` those of the kernels.
    """
    count, num = len(named), len(batch)
    bounds = batch.rows if filtered is None else filtered.bounds
    _named_kernel[triton.cdiv(count, _ENTRIES),](
        logits, model_logits, batch.rows, batch.temperature, batch.top_k, batch.top_p, batch.min_p,
        bounds, shown, *batch.named[:2], named, num, count,
        V=logits.shape[1], FILTERED=filtered is not None, SIZE=_ENTRIES, **flags,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num", "count"],
    do_not_specialize_on_alignment=[
        *("rows", "temperatures", "top_k", "top_p", "min_p", "bounds", "shown"),
        *("entry_rows", "entry_ids", "named"),
    ],
)
def _named_kernel(
    logits,
    model_logits,
    rows,
    temperatures,
    top_k,
    top_p,
    min_p,
    bounds,  # int32 [3, R], from `filters.Filtered`
    shown,  # float32 [4, R]
    entry_rows,  # int64 [E]
    entry_ids,  # int64 [E]
    named,  # float32 [E, 2], written
    num,  # R
    count,  # E
    V: tl.constexpr,
    FILTERED: tl.constexpr,
    CHANGED: tl.constexpr,
    RAW: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Compute the logprobs of named tokens. Grid (parts of the entries,)."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    sample = tl.load(entry_rows + at, mask=inside, other=0)
    ids = tl.load(entry_ids + at, mask=inside, other=0)
    divisor, _, _, least, filters = asks(sample, temperatures, top_k, top_p, min_p)
    highest, log_sum = finite_or_zero(tl.load(shown + sample)), tl.load(shown + num + sample)
    row = tl.load(rows + sample)
    x = tl.load(logits + (sample if CHANGED else row) * V + ids)
    distance = tl.div_rn(x - highest, divisor)
    if FILTERED:
        rank = distance_of(x, highest, divisor)
        cut = filters & (keeps(rank, ids, bounds, sample, num, least) == 0)
        distance = tl.where(cut, -float("inf"), distance)
    drawn = distance - log_sum
    raw = tl.zeros_like(drawn)
    if RAW:
        own_highest = finite_or_zero(tl.load(shown + 2 * num + sample))
        x = tl.load(model_logits + row * V + ids)
        raw = (x - own_highest) - tl.load(shown + 3 * num + sample)
        drawn = tl.where(tl.load(temperatures + sample) == 0, raw, drawn)
    tl.store(named + 2 * at, drawn, mask=inside)
    tl.store(named + 2 * at + 1, raw, mask=inside)


_TILE = 16  # samples ranked together: bounds memory, 8 bytes per token of the vocabulary
_SHOWN = 32  # best tokens in the smallest kernel: larger numbers are rounded up to powers of two
_LAST_ID = tl.constexpr(0x7FFFFFFF)


def best_tokens(
    draw: Draw,
    shown: Tensor,
    maxima: Tensor,
    logits: Tensor,
    model_logits: Tensor,
    batch: SamplingBatch,
    filtered: Filtered | None,
    changed: bool,
) -> None:
    """Fill in the best tokens of a draw.

    Each token of a row becomes one int64: its rank value in the upper half, its inverted id in the
    lower half. No two are equal, so `topk` is unambiguous.

    Args:
        draw: Draw. Its `top_ids` and `top_logprobs` are written.
        shown: float32 [4, R], first the maximum and log of the sum of odds of the logits that each
            sample shows. A greedy sample shows the model's own logits, any other sample the
            logits that it was drawn from.
        maxima: float32 [R, blocks] of `logits`.
        logits: float32 [L, V], or [R, V] if `changed`.
        model_logits: float32 [L, V], the model's own logits.
        batch: R samples.
        filtered: Result of the filters, if there are any.
        changed: True if row i of the logits belongs to sample i.
    """
    num, k = draw.top_ids.shape
    vocab, blocks = logits.shape[1], maxima.shape[1]
    ranks = torch.empty((min(_TILE, num), vocab), dtype=torch.int64, device=logits.device)
    bounds = draw.top_ids if filtered is None else filtered.bounds
    for first in range(0, num, _TILE):
        count = min(_TILE, num - first)
        _rank_kernel[count, num_blocks(vocab)](
            logits, model_logits, maxima, batch.rows, batch.temperature, batch.top_k, batch.top_p,
            batch.min_p, bounds, ranks,
            num, first, V=vocab, BLOCKS=blocks, WIDTH=triton.next_power_of_2(blocks),
            CHANGED=changed,
            FILTERED=filtered is not None, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        best = ranks[:count].topk(k, dim=-1).values
        _show_kernel[count,](
            best, batch.temperature, shown, draw.top_ids, draw.top_logprobs, num, first, k,
            WIDTH=max(_SHOWN, triton.next_power_of_2(k)), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num", "first"],
    do_not_specialize_on_alignment=["rows", "temperatures", "top_k", "top_p", "min_p", "bounds"],
)
def _rank_kernel(
    logits,
    model_logits,
    maxima,
    rows,
    temperatures,
    top_k,
    top_p,
    min_p,
    bounds,  # int32 [3, R], from `filters.Filtered`
    ranks,  # int64 [samples of this tile, V], written
    num,  # R
    first,  # first sample of the tile
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANGED: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the rank values of a block of tokens. Grid (samples of the tile, BLOCKS)."""
    tile_row = tl.program_id(0).to(tl.int64)
    sample = tile_row + first
    divisor, _, _, least, filters = asks(sample, temperatures, top_k, top_p, min_p)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = sample if CHANGED else tl.load(rows + sample)
    if tl.load(temperatures + sample) == 0:  # bits of the logit as an integer in the same order
        x_ptr = model_logits + tl.load(rows + sample) * V + ids
        x = tl.load(x_ptr, mask=ids < V, other=-float("inf"))
        x = tl.where(x == x, x, -float("inf")) + 0.0  # a sum is never -0
        bits = x.to(tl.int32, bitcast=True)
        value = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    else:
        x = tl.load(logits + row * V + ids, mask=ids < V, other=-float("inf"))
        distance = distance_of(x, row_maximum(maxima, sample, BLOCKS, WIDTH), divisor)
        stays = distance < CUT
        if FILTERED:
            stays = tl.where(filters, keeps(distance, ids, bounds, sample, num, least), stays)
        value = -tl.where(stays, distance, CUT)
    rank = (value.to(tl.int64) << 32) | (ids ^ _LAST_ID).to(tl.int64)
    tl.store(ranks + tile_row * V + ids, rank, mask=ids < V)


@triton.jit(  # one kernel for all numbers of shown tokens
    do_not_specialize=["num", "first", "K"],
    do_not_specialize_on_alignment=["temperatures", "best", "shown", "top_ids", "top_logprobs"],
)
def _show_kernel(
    best,  # int64 [samples of this tile, K]: rank values, falling
    temperatures,
    shown,  # float32 [4, R]
    top_ids,  # int64 [R, K], written
    top_logprobs,  # float32 [R, K], written
    num,
    first,
    K,
    WIDTH: tl.constexpr,  # at least K
):
    """Turn rank values into ids and logprobs. Grid (samples of the tile,)."""
    tile_row = tl.program_id(0).to(tl.int64)
    sample = tile_row + first
    columns = tl.arange(0, WIDTH)
    inside = columns < K
    rank = tl.load(best + tile_row * K + columns, mask=inside, other=0)
    value = (rank >> 32).to(tl.int32)
    x = tl.where(value >= 0, value, value ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    highest, log_sum = tl.load(shown + sample), tl.load(shown + num + sample)
    greedy = tl.load(temperatures + sample) == 0
    distance = tl.where(greedy, x - highest, -((-value).to(tl.float32, bitcast=True)))
    tl.store(top_ids + sample * K + columns, (rank & 0xFFFFFFFF) ^ _LAST_ID, mask=inside)
    tl.store(top_logprobs + sample * K + columns, distance - log_sum, mask=inside)
