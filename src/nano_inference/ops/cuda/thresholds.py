"""Distances, and the thresholds among them: what the kernels of `filters` are made of.

A *distance* is the bits of -(logit - maximum) / temperature, which rise as integers do: 0 is the
most probable token's. Mass is counted in whole numbers of 2**-40 of the first token's, so its sums
are exact in any order.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from nano_inference.ops.cuda.softmax import LOG2_E

LEVELS = tl.constexpr(16)
CUT = tl.constexpr(0x7F800000)  # distance of -inf; that of NaN is greater
_FIRST_LEVEL = tl.constexpr(0x3F000000)  # 0.5; then 0.75, 1, 1.5, 2, 3 … 64, and everything
_LEVEL_STEP = tl.constexpr(0x00400000)
UNIT = tl.constexpr(1099511627776.0)  # 2**40
_WAYS = tl.constexpr(8)
_MOST = tl.constexpr(2**62)


@triton.jit
def distance_of(x, highest, divisor):
    """Bits of -(x - highest) / divisor, int32: 0 for the first, `CUT` for -inf. Both zeros are
    one.
    """
    return tl.div_rn(x - highest, divisor).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def odds_of(distance):
    """Probability relative to the first; 0 for what is cut."""
    # 128, whose odds are 0 in float32; -inf and NaN are beyond it
    near = tl.minimum(distance, 0x43000000)
    return tl.exp2(near.to(tl.float32, bitcast=True) * -LOG2_E)


@triton.jit
def mass_of(odds):
    """Odds in whole numbers."""
    return (odds * UNIT).to(tl.int64)


@triton.jit
def level_end(index):
    """The last distance of a level."""
    return tl.where(index < LEVELS - 1, index * _LEVEL_STEP + _FIRST_LEVEL, CUT - 1)


@triton.jit
def target_of(p, mass):
    """What a prefix must hold to reach p of some mass: at least 1, since the first stays."""
    wanted = p.to(tl.float64) * mass.to(tl.float64)
    whole = wanted.to(tl.int64)
    whole += (whole.to(tl.float64) < wanted).to(tl.int64)
    return tl.minimum(tl.maximum(whole, 1), mass)


@triton.jit
def row_levels(counts, masses, sample, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens and mass within each level, of a whole row: two int64 [16]; with those of its
    blocks.
    """
    blocks = tl.arange(0, WIDTH)[:, None]
    places = (sample * BLOCKS + blocks) * LEVELS + tl.arange(0, LEVELS)[None, :]
    own = tl.load(counts + places, mask=blocks < BLOCKS, other=0)
    mass = tl.load(masses + places, mask=blocks < BLOCKS, other=0)
    return tl.sum(own, axis=0).to(tl.int64), tl.sum(mass, axis=0), own


@triton.jit
def reach_of(count, mass, k, p, least):
    """The first level that no filter reaches beyond.

    top_p counts the mass of what top_k leaves, so where both are on all of that is needed, however
    soon p is reached.
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
    """Distances and ids of the next tokens of a row: of the gathered, or of all; the other number
    is 0.
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
    """The level that holds a threshold, and not beyond `high`: its ends, and tokens and mass within
    each of them.
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
    """The threshold: the first distance within which the target is reached. (low, high] holds it
    always, and in the end one token only or tokens of one distance.
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
