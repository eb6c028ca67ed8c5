"""top_k, top_p and min_p without a sort, as specified in `sampling.filters`.

A token's rank is decided by its *distance*: the bits of -(logit - maximum) / temperature, which
rise like integers. Its probability is counted as an integer multiple of 2**-40 of the first
token's, so sums are exact in any order. There are four launches:

1. `_levels_kernel`: count the tokens and the mass within 16 fixed distances, for every block of a
   row.
2. `_plan_kernel`: find the first of these distances that no filter exceeds, and the number of
   tokens within it in each block.
3. `_gather_kernel`: gather these tokens in the order of their ids.
4. `_select_kernel`, one program per row: narrow the two thresholds down, eight parts of an interval
   per pass, break ties by id, and draw. It passes over the gathered tokens, typically a few
   hundred, which fit in its own cache. If there are more than `CAPACITY`, it passes over the row
   itself.

A single program per row would read 151,936 logits about ten times at the speed of one
multiprocessor, more than 50 µs per pass. With these launches, all multiprocessors read the row
twice.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.noise import exponential, key_halves
from nano_inference.ops.cuda.softmax import BLOCK, LOG2_E, divisor_of, finite_or_zero, num_blocks
from nano_inference.sampling.tensors import SamplingBatch

CAPACITY = 4096  # gathered tokens per row
LEVELS = tl.constexpr(16)
CUT = tl.constexpr(0x7F800000)  # distance of -inf, less than that of NaN
_FIRST_LEVEL = tl.constexpr(0x3F000000)  # 0.5, then 0.75, 1, 1.5, 2, 3 … 64, and everything
_LEVEL_STEP = tl.constexpr(0x00400000)
UNIT = tl.constexpr(1099511627776.0)  # 2**40
_WAYS = tl.constexpr(8)
_MOST = tl.constexpr(2**62)
# Read one number at a time: specializing on their alignment would compile more kernels.
_SCALARS = ["rows", "temperatures", "top_k", "top_p", "min_p"]


class Filtered(NamedTuple):
    """Result of the filters for each sample."""

    token_ids: Tensor  # int32 [R], drawn, or -1 for a sample without filters
    log_sums: Tensor  # float32 [R], log of the kept odds
    mass: Tensor  # float32 [R], log of the kept share
    # int32 [3, R]: all tokens up to the first distance are kept, and those up to the second
    # distance whose id is at most the third number
    bounds: Tensor


def apply(logits: Tensor, maxima: Tensor, batch: SamplingBatch, changed: bool) -> Filtered:
    """Filter the logits and draw.

    Args:
        logits: float32 [L, V], or [R, V] if `changed`.
        maxima: float32 [R, blocks] of the logits.
        batch: R samples.
        changed: True if row i of the logits belongs to sample i.
    """
    num, vocab, device = len(batch), logits.shape[1], logits.device
    blocks = num_blocks(vocab)
    room = min(CAPACITY, vocab)
    counts = torch.empty((num, blocks, LEVELS.value), dtype=torch.int32, device=device)
    masses = torch.empty(counts.shape, dtype=torch.int64, device=device)
    totals = torch.empty((num, 2, LEVELS.value), dtype=torch.int64, device=device)
    starts = torch.empty((num, blocks + 2), dtype=torch.int32, device=device)
    gathered = torch.empty((2, num, room), dtype=torch.int32, device=device)
    whole = torch.empty((4, num), dtype=torch.int32, device=device)
    log_sums, mass = torch.empty((2, num), device=device).unbind()
    filtered = Filtered(whole[0], log_sums, mass, whole[1:])
    asked = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
    inputs = (logits, maxima, batch.rows, *asked)
    width = {"BLOCKS": blocks, "WIDTH": triton.next_power_of_2(blocks)}
    sizes = {"V": vocab, "CHANGED": changed, **width}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    wide = {"num_warps": 8, "enable_fp_fusion": False}
    _levels_kernel[num, blocks](*inputs, counts, masses, **sizes, BLOCK=BLOCK, **options)
    _plan_kernel[num,](*asked, counts, masses, totals, starts, **width, ROOM=room, **options)
    _gather_kernel[num, blocks](
        *inputs, starts, *gathered.unbind(), **sizes, ROOM=room, BLOCK=BLOCK, **options
    )
    _select_kernel[num,](
        *inputs, totals, starts, *gathered.unbind(), batch.noise_keys, *filtered, num,
        **sizes, ROOM=room, CHUNK=256, **wide,
    )  # fmt: skip
    return filtered


def write_mask(
    kept: Tensor,
    filtered: Filtered,
    logits: Tensor,
    maxima: Tensor,
    batch: SamplingBatch,
    changed: bool,
) -> None:
    """Write the mask of the tokens that the filters kept: bool [R, V]. The other arguments are
    those of `apply`.
    """
    num, vocab = kept.shape
    blocks = num_blocks(vocab)
    _kept_kernel[num, blocks](
        logits, maxima, batch.rows, batch.temperature, batch.top_k, batch.top_p, batch.min_p,
        filtered.bounds, kept.view(torch.uint8), num,
        V=vocab, BLOCKS=blocks, WIDTH=triton.next_power_of_2(blocks), CHANGED=changed, BLOCK=BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def distance_of(x, highest, divisor):
    """Return the bits of -(x - highest) / divisor, int32: 0 for the first token, `CUT` for -inf.
    Both zeros are equal.
    """
    return tl.div_rn(x - highest, divisor).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def odds_of(distance):
    """Return the probability relative to the first token, 0 for cut tokens."""
    # 128, whose odds are 0 in float32: -inf and NaN exceed it
    near = tl.minimum(distance, 0x43000000)
    return tl.exp2(near.to(tl.float32, bitcast=True) * -LOG2_E)


@triton.jit
def mass_of(odds):
    """Convert odds to integers."""
    return (odds * UNIT).to(tl.int64)


@triton.jit
def level_end(index):
    """Return the last distance of a level."""
    return tl.where(index < LEVELS - 1, index * _LEVEL_STEP + _FIRST_LEVEL, CUT - 1)


@triton.jit
def target_of(p, mass):
    """Return the mass that a prefix must hold to reach a share p: at least 1, since the first token
    stays.
    """
    wanted = p.to(tl.float64) * mass.to(tl.float64)
    whole = wanted.to(tl.int64)
    whole += (whole.to(tl.float64) < wanted).to(tl.int64)
    return tl.minimum(tl.maximum(whole, 1), mass)


@triton.jit
def row_levels(counts, masses, sample, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """Return tokens and mass within each level over a whole row, two int64 [16], and the tokens of
    its blocks.
    """
    blocks = tl.arange(0, WIDTH)[:, None]
    places = (sample * BLOCKS + blocks) * LEVELS + tl.arange(0, LEVELS)[None, :]
    own = tl.load(counts + places, mask=blocks < BLOCKS, other=0)
    mass = tl.load(masses + places, mask=blocks < BLOCKS, other=0)
    return tl.sum(own, axis=0).to(tl.int64), tl.sum(mass, axis=0), own


@triton.jit
def reach_of(count, mass, k, p, least):
    """Return the first level that no filter exceeds.

    top_p counts the mass that top_k leaves. If both are active, all tokens within top_k are needed,
    even if p is reached sooner.
    """
    alive, whole = tl.max(count, axis=0), tl.max(mass, axis=0)
    far = level_end(tl.arange(0, LEVELS))
    by_k = tl.where(k > 0, tl.sum((count < tl.minimum(k, alive)).to(tl.int32), axis=0), LEVELS - 1)
    by_p = tl.where(p < 1, tl.sum((mass < target_of(p, whole)).to(tl.int32), axis=0), LEVELS - 1)
    by_least = tl.where(
        least > 0, tl.sum((odds_of(far) >= least * 0.99).to(tl.int32), axis=0), LEVELS - 1
    )
    first = tl.minimum(tl.minimum(by_k, by_p), tl.minimum(by_least, LEVELS - 1))
    return tl.where((k > 0) & (k < alive) & (p < 1), tl.minimum(by_k, LEVELS - 1), first)


@triton.jit
def load_chunk(
    start, num_gathered, num_whole, x, distances, token_ids, highest, divisor, CHUNK: tl.constexpr
):
    """Return distances and ids of the next tokens of a row: of the gathered tokens, or of all. The
    unused one of the two counts is 0.
    """
    places = start + tl.arange(0, CHUNK)
    gathered = places < num_gathered
    distance = tl.load(distances + places, mask=gathered, other=CUT)
    ids = tl.load(token_ids + places, mask=gathered, other=0)
    logits = tl.load(x + places, mask=places < num_whole, other=-float("inf"))
    return tl.minimum(distance, distance_of(logits, highest, divisor)), tl.where(
        gathered, ids, places
    )


@triton.jit
def bracket(reached, count, mass, high, count_high, mass_high):
    """Return the level that contains a threshold, but not beyond `high`: its ends, and tokens and
    mass within each end.
    """
    levels = tl.arange(0, LEVELS)
    index = tl.sum((reached == 0).to(tl.int32), axis=0)
    low = tl.where(index > 0, level_end(index - 1), -1)
    count_low = tl.max(tl.where(levels < index, count, 0), axis=0)
    mass_low = tl.max(tl.where(levels < index, mass, 0), axis=0)
    end = tl.where(index < LEVELS, level_end(index), CUT - 1)
    nearer = end < high
    count_end = tl.min(tl.where(levels >= index, count, _MOST), axis=0)
    mass_end = tl.min(tl.where(levels >= index, mass, _MOST), axis=0)
    high = tl.where(nearer, end, high)
    return (
        low,
        high,
        count_low,
        tl.where(nearer, count_end, count_high),
        mass_low,
        tl.where(nearer, mass_end, mass_high),
    )


@triton.jit
def narrow(
    low, high, count_low, count_high, mass_low, mass_high, target, num_gathered, num_whole, x,
    distances, token_ids,
    highest, divisor, BY_MASS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Narrow down the threshold: the first distance within which the target is reached. (low, high]
    always contains it. In the end it contains a single token, or tokens of a single distance.
    """
    while (high - low > 1) & (count_high - count_low > 1):
        step = (high - low - 1) // _WAYS + 1
        bounds = tl.minimum(low + step * (tl.arange(0, _WAYS) + 1), high)
        count = tl.zeros([_WAYS], tl.int64)
        mass = tl.zeros([_WAYS], tl.int64)
        for start in range(0, tl.maximum(num_gathered, num_whole), CHUNK):
            distance, _ = load_chunk(
                start, num_gathered, num_whole, x, distances, token_ids, highest, divisor, CHUNK
            )
            within = distance[:, None] <= bounds[None, :]
            count += tl.sum(within.to(tl.int32), axis=0)
            mass += tl.sum(tl.where(within, mass_of(odds_of(distance))[:, None], 0), axis=0)
        reached = (mass if BY_MASS else count) >= target
        high = tl.min(tl.where(reached, bounds, high), axis=0)
        count_high = tl.min(tl.where(reached, count, count_high), axis=0)
        mass_high = tl.min(tl.where(reached, mass, mass_high), axis=0)
        low = tl.max(tl.where(reached, low, bounds), axis=0)
        count_low = tl.max(tl.where(reached, count_low, count), axis=0)
        mass_low = tl.max(tl.where(reached, mass_low, mass), axis=0)
    return low, high, count_low, count_high, mass_low, mass_high


@triton.jit
def asks(sample, temperatures, top_k, top_p, min_p):
    """Return a sample's divisor and filters, and True if a filter applies, never for greedy
    samples.
    """
    divisor, greedy = divisor_of(tl.load(temperatures + sample))
    k, p, least = tl.load(top_k + sample), tl.load(top_p + sample), tl.load(min_p + sample)
    return divisor, k, p, least, ((k > 0) | (p < 1) | (least > 0)) & (greedy == 0)


@triton.jit
def row_maximum(maxima, sample, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the maximum of a sample's logits, 0 if all are cut."""
    blocks = tl.arange(0, WIDTH)
    whole = tl.load(maxima + sample * BLOCKS + blocks, mask=blocks < BLOCKS, other=-float("inf"))
    return finite_or_zero(tl.max(whole, axis=0))


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def _levels_kernel(
    logits,  # float32 [L, V], or [R, V] if CHANGED
    maxima,  # float32 [R, BLOCKS]
    rows,  # int64 [R]
    temperatures,  # float64 [R]
    top_k,  # int64 [R]
    top_p,  # float32 [R]
    min_p,  # float32 [R]
    counts,  # int32 [R, BLOCKS, 16], written
    masses,  # int64 [R, BLOCKS, 16], written
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,  # BLOCKS, rounded up to a power of 2
    CHANGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the tokens and the mass of a block within each level. Grid (R, BLOCKS)."""
    sample, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    divisor, _, _, _, filters = asks(sample, temperatures, top_k, top_p, min_p)
    if filters:
        highest = row_maximum(maxima, sample, BLOCKS, WIDTH)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        row = sample if CHANGED else tl.load(rows + sample)
        x = tl.load(logits + row * V + ids, mask=ids < V, other=-float("inf"))
        distance = distance_of(x, highest, divisor)
        mass = mass_of(odds_of(distance))
        place = (sample * BLOCKS + block) * LEVELS
        for index in tl.static_range(LEVELS):
            within = distance <= level_end(index)
            tl.store(counts + place + index, tl.sum(within.to(tl.int32), axis=0))
            tl.store(masses + place + index, tl.sum(tl.where(within, mass, 0), axis=0))


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def _plan_kernel(
    temperatures,
    top_k,
    top_p,
    min_p,
    counts,
    masses,
    totals,  # int64 [R, 2, 16]: tokens and mass within each level of the whole row, written
    # int32 [R, BLOCKS + 2], written: start of each block's tokens, their number (all 0 if there are
    # too many), the level
    starts,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Plan which tokens of a row to gather. Grid (R,)."""
    sample = tl.program_id(0).to(tl.int64)
    _, k, p, least, filters = asks(sample, temperatures, top_k, top_p, min_p)
    if filters:
        count, mass, of_blocks = row_levels(counts, masses, sample, BLOCKS, WIDTH)
        levels = tl.arange(0, LEVELS)
        tl.store(totals + sample * 2 * LEVELS + levels, count)
        tl.store(totals + (sample * 2 + 1) * LEVELS + levels, mass)
        reach = reach_of(count, mass, k, p, least)
        own = tl.sum(tl.where(levels[None, :] == reach, of_blocks, 0), axis=1)
        num = tl.sum(own, axis=0)
        own = tl.where(num <= ROOM, own, 0)
        blocks = tl.arange(0, WIDTH)
        plan = starts + sample * (BLOCKS + 2)
        tl.store(plan + blocks, tl.cumsum(own, axis=0) - own, mask=blocks < BLOCKS)
        tl.store(plan + BLOCKS, tl.where(num <= ROOM, num, 0))
        tl.store(plan + BLOCKS + 1, reach)


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def _gather_kernel(
    logits,
    maxima,
    rows,
    temperatures,
    top_k,
    top_p,
    min_p,
    starts,  # int32 [R, BLOCKS + 2], from `_plan_kernel`
    distances,  # int32 [R, ROOM], written
    token_ids,  # int32 [R, ROOM], written
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANGED: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather the tokens of a block within the row's reach, after those of earlier blocks. Grid (R,
    BLOCKS).
    """
    sample, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    divisor, _, _, _, filters = asks(sample, temperatures, top_k, top_p, min_p)
    if filters:
        plan = starts + sample * (BLOCKS + 2)
        start = tl.load(plan + block)
        if tl.load(plan + block + 1) > start:
            reach = tl.load(plan + BLOCKS + 1)
            highest = row_maximum(maxima, sample, BLOCKS, WIDTH)
            ids = block * BLOCK + tl.arange(0, BLOCK)
            row = sample if CHANGED else tl.load(rows + sample)
            x = tl.load(logits + row * V + ids, mask=ids < V, other=-float("inf"))
            distance = distance_of(x, highest, divisor)
            within = distance <= level_end(reach)
            places = sample * ROOM + start + tl.cumsum(within.to(tl.int32), axis=0) - 1
            tl.store(distances + places, distance, mask=within)
            tl.store(token_ids + places, ids, mask=within)


@triton.jit(
    do_not_specialize=["num"],
    do_not_specialize_on_alignment=[*_SCALARS, "keys", "drawn", "log_sums", "log_mass", "bounds"],
)
def _select_kernel(
    logits,
    maxima,
    rows,
    temperatures,
    top_k,
    top_p,
    min_p,
    totals,
    starts,
    distances,
    token_ids,
    keys,  # int64 [R, 2]
    drawn,  # int32 [R], written like all below, as in `Filtered`
    log_sums,  # float32 [R]
    log_mass,  # float32 [R]
    bounds,  # int32 [3, R]
    num,  # R
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANGED: tl.constexpr,
    ROOM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Find the thresholds of a row, and race the remaining tokens. Grid (R,)."""
    sample = tl.program_id(0).to(tl.int64)
    divisor, k, p, least, filters = asks(sample, temperatures, top_k, top_p, min_p)
    if filters == 0:
        tl.store(drawn + sample, -1)
    else:
        highest = row_maximum(maxima, sample, BLOCKS, WIDTH)
        levels = totals + sample * 2 * LEVELS + tl.arange(0, LEVELS)
        count, mass = tl.load(levels), tl.load(levels + LEVELS)
        alive, whole = tl.max(count, axis=0), tl.max(mass, axis=0)
        num_gathered = tl.load(starts + sample * (BLOCKS + 2) + BLOCKS)
        num_whole = tl.where(num_gathered > 0, 0, V)
        x = logits + (sample if CHANGED else tl.load(rows + sample)) * V
        distances += sample * ROOM
        token_ids += sample * ROOM
        # Without top_k, all tokens that are not cut are within its threshold.
        low, high, count_low, count_high, mass_low, mass_high = (
            CUT - 1,
            CUT - 1,
            alive,
            alive,
            whole,
            whole,
        )
        quota, left = alive * 0, whole
        if (k > 0) & (k < alive):
            low, high, count_low, count_high, mass_low, mass_high = bracket(
                count >= k, count, mass, high, count_high, mass_high
            )
            low, high, count_low, count_high, mass_low, mass_high = narrow(
                low, high, count_low, count_high, mass_low, mass_high, k, num_gathered, num_whole,
                x, distances, token_ids, highest, divisor, False, CHUNK,
            )  # fmt: skip
            quota = k - count_low
            left = mass_low + quota * ((mass_high - mass_low) // (count_high - count_low))
        if p < 1:
            target = target_of(p, left)
            low, high, count_low, count_high, mass_low, mass_high = bracket(
                mass >= target, count, mass, high, count_high, mass_high
            )
            low, high, count_low, count_high, mass_low, mass_high = narrow(
                low, high, count_low, count_high, mass_low, mass_high, target, num_gathered,
                num_whole,
                x, distances, token_ids, highest, divisor, True, CHUNK,
            )  # fmt: skip
            each = tl.maximum((mass_high - mass_low) // tl.maximum(count_high - count_low, 1), 1)
            quota = (target - mass_low + each - 1) // each
        low_half, high_half = key_halves(keys, sample)
        best, token, sum_kept, level, last = -1.0, 0, alive * 0, alive * 0, -1
        for start in range(0, tl.maximum(num_gathered, num_whole), CHUNK):
            distance, ids = load_chunk(
                start, num_gathered, num_whole, x, distances, token_ids, highest, divisor, CHUNK
            )
            odds = odds_of(distance)
            tied = (distance > low) & (distance <= high)
            ranks = level + tl.cumsum(tied.to(tl.int32), axis=0)
            kept_tie = tied & (ranks <= quota)
            last = tl.maximum(last, tl.max(tl.where(kept_tie, ids, -1), axis=0))
            kept = ((distance <= low) | kept_tie) & (odds >= least) & (distance < CUT)
            sum_kept += tl.sum(tl.where(kept, mass_of(odds), 0), axis=0)
            times = tl.where(kept, odds / exponential(ids, low_half, high_half), -1.0)
            first = tl.max(times, axis=0)
            winner = tl.min(tl.where(times == first, ids, V), axis=0)
            token = tl.where(first > best, winner, token)
            best = tl.maximum(best, first)
            level += tl.sum(tied.to(tl.int32), axis=0)
        tl.store(drawn + sample, token)
        kept_mass, whole_mass = sum_kept.to(tl.float32), tl.maximum(whole, 1).to(tl.float32)
        part = tl.div_rn(kept_mass, whole_mass)
        tl.store(log_sums + sample, tl.log(kept_mass * (1 / UNIT)))
        tl.store(log_mass + sample, tl.log(part))
        tl.store(bounds + sample, low)
        tl.store(bounds + num + sample, high)
        tl.store(bounds + 2 * num + sample, last)


@triton.jit
def keeps(distance, ids, bounds, sample, num, least):
    """Return True for each token that a sample's filters kept. -inf and NaN are always cut."""
    low, high = tl.load(bounds + sample), tl.load(bounds + num + sample)
    last = tl.load(bounds + 2 * num + sample)
    return (
        ((distance <= low) | ((distance <= high) & (ids <= last)))
        & (odds_of(distance) >= least)
        & (distance < CUT)
    )


@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=[*_SCALARS, "bounds"])
def _kept_kernel(
    logits,
    maxima,
    rows,
    temperatures,
    top_k,
    top_p,
    min_p,
    bounds,
    kept,  # uint8 [R, V], written
    num,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write which tokens of a block were kept, all for a greedy sample. Grid (R, BLOCKS)."""
    sample, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    divisor, _, _, least, filters = asks(sample, temperatures, top_k, top_p, min_p)
    highest = row_maximum(maxima, sample, BLOCKS, WIDTH)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    row = sample if CHANGED else tl.load(rows + sample)
    x = tl.load(logits + row * V + ids, mask=ids < V, other=-float("inf"))
    distance = distance_of(x, highest, divisor)
    alive = distance <= tl.where(tl.load(temperatures + sample) == 0, 0x7FFFFFFF, CUT - 1)
    stays = tl.where(filters, keeps(distance, ids, bounds, sample, num, least), alive)
    tl.store(kept + sample * V + ids, stays.to(tl.uint8), mask=ids < V)
