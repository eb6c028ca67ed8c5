"""The end of a step on the CPU: draws, scores and logits of hidden rows, each one call of the
kernels in head.cpp; and draws and scores where each rank holds a part of the vocabulary.
"""

import ctypes
from collections.abc import Generator
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.ops.backend import HeadParts
from nano_inference.ops.cpu.library import struct
from nano_inference.ops.cpu.weights import PackedWeight, as_packed
from nano_inference.sampling.parts import VocabPart
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import COLUMNS, SamplingBatch

_MEMORY, _ROW, _ID = 1, 2, 3  # `HeadError` of head.h
BLOCK = 384  # VOCAB_BLOCK of filters.h
BEST = 32  # bytes of `Best` of noise.h

HeadInput, DrawBatch = struct("HeadInput"), struct("DrawBatch")
ScoreBatch, HeadPart = struct("ScoreBatch"), struct("HeadPart")


class Pointer(NamedTuple):
    """A field of `DrawBatch` that is the address of a tensor of a `SamplingBatch`."""

    entries: str | None  # the structure in it, for `Entries`
    name: str
    dtype: torch.dtype


def _pointers() -> list[Pointer]:
    found: list[Pointer] = []
    for name, column in COLUMNS.items():
        if column.sizes == ("E",):
            dtypes = {"rows": torch.int64, "ids": torch.int64, "values": column.dtype}
            found += [Pointer(name, part, dtype) for part, dtype in dtypes.items()]
        elif not column.on_host:
            found.append(Pointer(None, name, column.dtype))
    return found


_POINTERS = _pointers()
_ENTRIES = tuple(dict.fromkeys(each.entries for each in _POINTERS if each.entries))
_tensors_of = attrgetter(
    *(f"{each.entries}.{each.name}" if each.entries else each.name for each in _POINTERS)
)
_RESULTS = tuple(each.name for each in fields(Draw))


def draw(
    kernels: Any,
    hidden: Tensor,
    weight: PackedWeight,
    divisor: float,
    batch: SamplingBatch,
    num_threads: int,
) -> Draw:
    """Draw one token for each sample, without storing the logits.

    Args:
        kernels: the library, as `library.load` gives it.
        hidden: [L, H] rows after the last norm, of the weight's dtype.
        weight: [V, H].
        divisor: of the products.
        batch: R samples; `batch.rows` says which row each one draws from.
        num_threads: how many share the work; no bit depends on it.

    Raises:
        IndexError: a sample names a row or a token that is not there.
    """
    return _draw(kernels, products(hidden, weight, divisor, num_threads), batch)


def draw_logits(kernels: Any, logits: Tensor, batch: SamplingBatch, num_threads: int) -> Draw:
    """The same from logits that are there already: float32 [L, V], divided by what they are to be
    divided by.
    """
    given, _alive = _given(logits, num_threads)
    return _draw(kernels, given, batch)


def _given(logits: Tensor, num_threads: int) -> tuple[Any, Tensor]:
    """The input that says so, and the tensor that it points to."""
    if logits.dtype != torch.float32 or logits.dim() != 2:
        raise ValueError(f"logits must be float32 [L, V], not {logits.dtype} {list(logits.shape)}.")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab = logits.shape
    given = HeadInput(
        None, None, logits.data_ptr(), 0, logits.stride(0), num_rows, vocab, 0, 4, num_threads, 1.0
    )
    return given, logits


def score(
    kernels: Any,
    hidden: Tensor,
    weight: PackedWeight,
    divisor: float,
    token_ids: Tensor,
    temperatures: Tensor,
    num_threads: int,
) -> Tensor:
    """Log-probability of one token a row under softmax(logits / temperature).

    It is to the bit what `draw` reports of that token: at temperature 1 as the raw logprob, at
    another as the logprob of a sample that was drawn there without filters.

    Args:
        kernels: as in `draw`, like all that is not said here.
        hidden: [L, H].
        weight: [V, H].
        divisor: of the products.
        token_ids: int64 [L].
        temperatures: [L], above 0.
        num_threads: as in `draw`.

    Returns:
        float32 [L].

    Raises:
        IndexError: a token is not in the vocabulary.
    """
    given, targets = (
        products(hidden, weight, divisor, num_threads),
        Targets(token_ids, temperatures),
    )
    check(kernels.nano_score(ctypes.addressof(given), targets.address), given)
    return targets.logprobs


def score_logits(
    kernels: Any, logits: Tensor, token_ids: Tensor, temperatures: Tensor, num_threads: int
) -> Tensor:
    """The same from logits that are there already, as in `draw_logits`."""
    given, targets = _given(logits, num_threads), Targets(token_ids, temperatures)
    check(kernels.nano_score(ctypes.addressof(given[0]), targets.address), given[0])
    return targets.logprobs


def logits(
    kernels: Any, hidden: Tensor, weight: PackedWeight, divisor: float, num_threads: int
) -> Tensor:
    """Products over the divisor, float32 [L, V]; arguments as in `draw`."""
    out = torch.empty((len(hidden), weight.rows))
    given = products(hidden, weight, divisor, num_threads)
    check(kernels.nano_logits(ctypes.addressof(given), out.data_ptr()), given)
    return out


def products(hidden: Tensor, weight: PackedWeight, divisor: float, num_threads: int) -> Any:
    """The input of calls that multiply. Raises ValueError for rows that do not fit."""
    if (
        hidden.dtype != weight.dtype
        or hidden.shape[1:] != (weight.columns,)
        or hidden.stride(1) != 1
    ):
        raise ValueError(
            f"hidden rows must be {weight.dtype} [L, {weight.columns}] with whole rows, "
            f"not {hidden.dtype} {list(hidden.shape)}."
        )
    return HeadInput(
        hidden.data_ptr(),
        weight.data_ptr(),
        None,
        hidden.stride(0),
        0,
        len(hidden),
        weight.rows,
        weight.columns,
        hidden.element_size(),
        num_threads,
        divisor,
    )


def _draw(kernels: Any, given: Any, batch: SamplingBatch) -> Draw:
    try:
        call = _idle.pop()
    except IndexError:  # others draw meanwhile, or none has yet
        call = DrawCall()
    drawn = call.bind(batch, given.vocab)
    check(kernels.nano_draw(ctypes.addressof(given), call.address), given)
    _idle.append(call)
    return drawn


class Targets:
    """A `ScoreBatch` with the memory that it points to, and the logprobs that it fills."""

    def __init__(self, token_ids: Tensor, temperatures: Tensor) -> None:
        rows, self.logprobs = torch.arange(len(token_ids)), torch.empty(len(token_ids))
        token_ids, temperatures = (
            _plain(token_ids, torch.int64),
            _plain(temperatures, torch.float64),
        )
        self._alive = rows, token_ids, temperatures
        pointers = (tensor.data_ptr() for tensor in (*self._alive, self.logprobs))
        self._struct = ScoreBatch(len(token_ids), *pointers)
        self.address = ctypes.addressof(self._struct)


class DrawCall:
    """A `DrawBatch` with the tensors that it points to. It is used again: of a batch only those
    tensors are looked at that the batch before did not have.
    """

    def __init__(self) -> None:
        self._struct = DrawBatch()
        self.address = ctypes.addressof(self._struct)
        self._places = [
            getattr(self._struct, each.entries) if each.entries else self._struct
            for each in _POINTERS
        ]
        self._tensors: list[Any] = [None] * len(_POINTERS)

    def bind(self, batch: SamplingBatch, vocab: int) -> Draw:
        """Point to the tensors of a batch, and to those of the result, which the call fills."""
        held = self._tensors
        for i, tensor in enumerate(_tensors_of(batch)):
            if tensor is not held[i]:
                held[i] = _plain(tensor, _POINTERS[i].dtype)
                setattr(self._places[i], _POINTERS[i].name, held[i].data_ptr())
        own = self._struct
        for name in _ENTRIES:
            getattr(own, name).count = len(getattr(batch, name).ids)
        own.num_samples, own.wants_raw = len(batch.rows), batch.any_raw
        own.num_masks, own.mask_width = batch.mask_words.shape
        drawn = _empty_draw(batch, vocab)
        own.num_top = drawn.top_ids.shape[1]
        for name in _RESULTS:
            tensor = getattr(drawn, name)
            setattr(own, name, None if tensor is None else tensor.data_ptr())
        return drawn


_idle: list[DrawCall] = []  # those that no thread uses


def _empty_draw(batch: SamplingBatch, vocab: int) -> Draw:
    num, num_top = len(batch), min(batch.most_top, vocab)
    logprobs, raw_logprobs, mass = torch.empty((3, num)).unbind()
    kept = (
        torch.empty((num, vocab), dtype=torch.bool) if batch.any_kept and batch.any_filter else None
    )
    top_ids = torch.empty((num, num_top), dtype=torch.int64)
    return Draw(
        torch.empty(num, dtype=torch.int64),
        logprobs,
        raw_logprobs,
        mass,
        kept,
        top_ids,
        torch.empty((num, num_top)),
    )


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers as the kernels read them."""
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def check(error: int, given: Any) -> None:
    """Raise what a `HeadError` means."""
    if error == _MEMORY:
        raise MemoryError("there is not enough memory for the logits of this step.")
    if error == _ROW:
        raise IndexError(
            f"a sample names a row that is not among the {given.num_rows} rows of this step."
        )
    if error == _ID:
        raise IndexError(f"a token id is not below the vocabulary's {given.whole or given.vocab}.")


def head_parts(kernels: Any, num_threads: int) -> HeadParts:
    """The two generators, by these kernels."""

    def sample(
        hidden: Tensor, weight: PackedWeight, divisor: float, batch: SamplingBatch, part: VocabPart
    ) -> Generator[Tensor, list[Tensor], Draw]:
        call = DrawCall()
        drawn = call.bind(batch, part.vocab_size)
        given = _part_of(products(hidden, as_packed(weight), divisor, num_threads), part)
        calls = kernels.nano_draw_part, kernels.nano_draw_whole
        yield from _exchange(calls, given, call.address, len(batch), part)
        return drawn

    def score(
        hidden: Tensor,
        weight: PackedWeight,
        divisor: float,
        token_ids: Tensor,
        temperatures: Tensor,
        part: VocabPart,
    ) -> Generator[Tensor, list[Tensor], Tensor]:
        targets = Targets(token_ids, temperatures)
        given = _part_of(products(hidden, as_packed(weight), divisor, num_threads), part)
        calls = kernels.nano_score_part, kernels.nano_score_whole
        yield from _exchange(calls, given, targets.address, len(token_ids), part)
        return targets.logprobs

    return HeadParts(BLOCK, sample, score)


def _part_of(given: Any, part: VocabPart) -> Any:
    if given.vocab != part.size:
        raise ValueError(
            f"the weight has {given.vocab} rows; rank {part.rank} holds {part.size} tokens."
        )
    given.first, given.whole = part.first, part.vocab_size
    return given


def _exchange(
    calls: tuple[Any, Any], given: Any, request: int, num: int, part: VocabPart
) -> Generator[Tensor, list[Tensor], None]:
    """Both calls, and between them the yield of what this rank has found: bytes, as many on every
    rank.
    """
    if num == 0:
        return
    counts = part.num_blocks(BLOCK)
    own, most = counts[part.rank], max(counts)
    statistics, best = torch.empty((2, 3 * num * own)), torch.empty((num, BEST), dtype=torch.uint8)
    found = HeadPart(statistics[0].data_ptr(), statistics[1].data_ptr(), best.data_ptr(), 0)
    check(calls[0](ctypes.addressof(given), request, ctypes.addressof(found)), given)
    views = found.num_views
    message = torch.zeros((2, views, most))
    message[:, :, :own] = statistics[:, : views * own].view(2, views, own)
    gathered = yield torch.cat([message.view(-1).view(torch.uint8), best.view(-1)])
    size = message.numel() * message.element_size()
    every = [each[:size].view(torch.float32).view(2, views, most) for each in gathered]
    whole = torch.cat(
        [each[:, :, :count] for each, count in zip(every, counts, strict=True)], dim=2
    ).contiguous()
    bests = torch.cat([each[size:] for each in gathered])
    parts = HeadPart(whole[0].data_ptr(), whole[1].data_ptr(), bests.data_ptr(), views)
    together = HeadInput(num_rows=given.num_rows, vocab=part.vocab_size, num_threads=1)
    check(
        calls[1](ctypes.addressof(together), request, ctypes.addressof(parts), len(gathered)),
        together,
    )
