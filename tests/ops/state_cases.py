"""Sequences through layers with a state, in any chunks, with NaN in memory that is not written."""

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.device.state_tensors import StateStorage
from nano_inference.device.units import UnitMap
from nano_inference.models.spec.states import DeltaNet, ShortConv, StateSpec
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.state import DeltaWeights, ShortConvWeights

SIZE = 8  # tokens per block
TABLES = ((3, 0, 6, 2, 9, 4), (1, 5, 7, 8))
LENGTHS = (43, 20)
DELTA = DeltaNet((True,), 2, 4, 32, 48, 4)
TILES = replace(DELTA, in_tiles=True)
CONV = ShortConv((True,), 48, 3, bias=True)
# three value heads for a key head, and widths that are not a power of two
UNEVEN = DeltaNet((True,), 1, 3, 24, 20, 2)
Cuts = tuple[tuple[int, ...], ...]
CUTS: tuple[Cuts, ...] = (
    ((1, 2, 8, 9, 31, 40), (16,)),
    (tuple(range(1, 43)), tuple(range(1, 20))),
    ((7, 24), ()),
)
Change = Callable[[ForwardBatch, Tensor], tuple[ForwardBatch, Tensor]]


class Texts(NamedTuple):
    """Sequences in a storage.

    Attributes:
        size: Tokens per block.
        tables: Block table of each sequence.
        lengths: Length of each sequence.
        device: Device of all tensors.
    """

    size: int = SIZE
    tables: tuple[tuple[int, ...], ...] = TABLES
    lengths: tuple[int, ...] = LENGTHS
    device: str = "cpu"


PLAIN = Texts()


@functools.cache
def numbers(spec: StateSpec, dtype: torch.dtype, texts: Texts = PLAIN) -> tuple[Tensor, Any]:
    """Return projected float32 rows of all sequences, concatenated, and the weights."""
    generator = torch.Generator(texts.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=texts.device)

    rows = sum(texts.lengths)
    if isinstance(spec, ShortConv):
        conv = draw(spec.channels, 1, spec.taps).to(dtype)
        bias = draw(spec.channels).to(dtype) if spec.bias else None
        return draw(rows, 3 * spec.channels), ShortConvWeights(conv, bias)
    conv, norm = draw(spec.channels, 1, spec.taps).to(dtype), draw(spec.value_dim).to(dtype)
    heads = spec.value_heads
    sizes = (spec.key_heads, heads, spec.key_dim, spec.value_dim)
    weights = DeltaWeights(conv, draw(heads), draw(heads), norm, 1e-5, *sizes, spec.in_tiles)
    return draw(rows, spec.channels + spec.value_width + 2 * heads), weights


def storage(
    spec: StateSpec, dtype: torch.dtype, texts: Texts = PLAIN, units: UnitMap | None = None
) -> StateStorage:
    """Return a storage of all blocks, filled with NaN."""
    blocks = 1 + max(map(max, texts.tables))
    view = StateStorage(spec, blocks, texts.size, dtype, torch.device(texts.device), units)
    for tensor in view.tensors.values():
        tensor.fill_(torch.nan)
    return view


def computed(
    spec: StateSpec,
    dtype: torch.dtype,
    states: Any,
    cuts: Cuts = (),
    texts: Texts = PLAIN,
    *,
    view: StateStorage | None = None,
    change: Change = lambda batch, rows: (batch, rows),
) -> tuple[list[Tensor], list[Tensor]]:
    """Return each sequence's outputs, computed in chunks that begin at these cuts, and the stored
    states of its tokens and blocks, as bytes. `change` may add padding to each step.
    """
    projected, weights = numbers(spec, dtype, texts)
    view = view or storage(spec, dtype, texts)
    operation = states.delta_net if isinstance(spec, DeltaNet) else states.short_conv
    parts = projected.split(texts.lengths)
    outputs: list[list[Tensor]] = [[] for _ in texts.lengths]
    inner = cuts or ((),) * len(texts.lengths)
    bounds = [(0, *cut, length) for cut, length in zip(inner, texts.lengths, strict=True)]
    for step in range(max(map(len, bounds)) - 1):
        live = [i for i, each in enumerate(bounds) if step + 1 < len(each)]
        spans = [(bounds[i][step], bounds[i][step + 1]) for i in live]
        chunks = [
            Rows([0] * (end - start), start, texts.tables[i])
            for i, (start, end) in zip(live, spans, strict=True)
        ]
        rows = torch.cat([parts[i][slice(*span)] for i, span in zip(live, spans, strict=True)])
        batch, rows = change(_on(batch_of_rows(chunks, texts.size), texts.device), rows)
        out = operation(rows, weights, batch, view, 0).to(dtype)
        lengths = [end - start for start, end in spans]
        for i, piece in zip(live, out[: sum(lengths)].split(lengths), strict=True):
            outputs[i].append(piece)
    kept = [t.view(torch.uint8) for t in view.tensors.values()]
    return [torch.cat(each) for each in outputs], kept


def _on(batch: ForwardBatch, device: str) -> ForwardBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {name: each.to(device) for name, each in values.items() if isinstance(each, Tensor)}
    return replace(batch, **tensors)
