"""The end of a step on the CPU: draws, scores and logits of hidden rows, each one call of the
kernels in head.cpp; and draws and scores where each rank holds a part of the vocabulary.
"""

import ctypes
from collections.abc import Generator
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nano_inference.ops.cpu.library import struct
from nano_inference.ops.cpu.weights import PackedWeight
from nano_inference.ops.interface import HeadParts, Weight
from nano_inference.sampling.logit_scale import UNSCALED, LogitScale
from nano_inference.sampling.parts import VocabPart
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import COLUMNS
from nano_inference.sampling.tensors import SamplingBatch, torch_dtype

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
            dtypes = {"rows": torch.int64, "ids": torch.int64, "values": torch_dtype(column.dtype)}
            found += [Pointer(name, part, dtype) for part, dtype in dtypes.items()]
        elif not column.on_host:
            found.append(Pointer(None, name, torch_dtype(column.dtype)))
    for each in found:  # ctypes would take any name, and the kernels would never see it
        place = getattr(DrawBatch(), each.entries) if each.entries else DrawBatch()
        assert hasattr(place, each.name), f"DrawBatch of head.h lacks {each.name} ({each.entries})"
    return found


_POINTERS = _pointers()
_ENTRIES = tuple(dict.fromkeys(each.entries for each in _POINTERS if each.entries))
_tensors_of = attrgetter(
    *(f"{each.entries}.{each.name}" if each.entries else each.name for each in _POINTERS)
)
_RESULTS = tuple(each.name for each in fields(Draw))


class CpuHead:
    """What `Ops` does with hidden rows or logits, by the kernels, run by so many threads: no bit
    depends on how many. See `Ops`; weights are [V, H], and hidden rows have their dtype.

    Raises:
        IndexError: a sample names a row, or a token, that is not there.
        ValueError: rows do not fit the weight, or logits are not float32 [L, V].
    """

    def __init__(self, kernels: Any, num_threads: int) -> None:
        self.kernels, self._num_threads = kernels, num_threads
        self.head_parts = HeadParts(BLOCK, self._sample_part, self._score_part)

    def sample(
        self, hidden: Tensor, weight: PackedWeight, scale: LogitScale, batch: SamplingBatch
    ) -> Draw:
        """See `Ops.sample`. The logits are not stored."""
        return self._draw(self._products(hidden, weight, scale), batch)

    def sample_logits(self, logits: Tensor, batch: SamplingBatch) -> Draw:
        """See `Ops.sample_logits`."""
        given, _alive = self._given(logits)
        return self._draw(given, batch)

    def gather_logprobs(
        self,
        hidden: Tensor,
        weight: PackedWeight,
        scale: LogitScale,
        token_ids: Tensor,
        temperatures: Tensor,
    ) -> Tensor:
        """See `Ops.gather_logprobs`: at temperature 1 the raw logprob, at another that of a sample
        that was drawn there without filters.
        """
        return self._score(self._products(hidden, weight, scale), token_ids, temperatures)

    def score_logits(self, logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> Tensor:
        """See `Ops.score_logits`."""
        given, _alive = self._given(logits)
        return self._score(given, token_ids, temperatures)

    def logits(self, hidden: Tensor, weight: PackedWeight, scale: LogitScale = UNSCALED) -> Tensor:
        """See `Ops.logits`."""
        given = self._products(hidden, weight, scale)
        out = torch.empty((given.num_rows, given.vocab))
        check(self.kernels.nano_logits(ctypes.addressof(given), out.data_ptr()), given)
        return out

    def _draw(self, given: Any, batch: SamplingBatch) -> Draw:
        try:
            call = _idle.pop()
        except IndexError:  # others draw meanwhile, or none has yet
            call = DrawCall()
        drawn = call.bind(batch, given.vocab)
        check(self.kernels.nano_draw(ctypes.addressof(given), call.address), given)
        _idle.append(call)
        return drawn

    def _score(self, given: Any, token_ids: Tensor, temperatures: Tensor) -> Tensor:
        targets = Targets(token_ids, temperatures)
        check(self.kernels.nano_score(ctypes.addressof(given), targets.address), given)
        return targets.logprobs

    def _sample_part(
        self,
        hidden: Tensor,
        weight: Weight,
        scale: LogitScale,
        batch: SamplingBatch,
        part: VocabPart,
    ) -> Generator[Tensor, list[Tensor], Draw]:
        """See `HeadParts.sample`."""
        call = DrawCall()
        drawn = call.bind(batch, part.vocab_size)
        given = _part_of(self._products(hidden, cast("PackedWeight", weight), scale), part)
        calls = self.kernels.nano_draw_part, self.kernels.nano_draw_whole
        yield from _exchange(calls, given, call.address, len(batch), part)
        return drawn

    def _score_part(
        self,
        hidden: Tensor,
        weight: Weight,
        scale: LogitScale,
        token_ids: Tensor,
        temperatures: Tensor,
        part: VocabPart,
    ) -> Generator[Tensor, list[Tensor], Tensor]:
        """See `HeadParts.score`."""
        targets = Targets(token_ids, temperatures)
        given = _part_of(self._products(hidden, cast("PackedWeight", weight), scale), part)
        calls = self.kernels.nano_score_part, self.kernels.nano_score_whole
        yield from _exchange(calls, given, targets.address, len(token_ids), part)
        return targets.logprobs

    def _given(self, logits: Tensor) -> tuple[Any, Tensor]:
        """The input of calls that have logits, and the tensor that it points to."""
        if logits.dtype != torch.float32 or logits.dim() != 2:
            raise ValueError(
                f"logits must be float32 [L, V], not {logits.dtype} {list(logits.shape)}."
            )
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, vocab = logits.shape
        address, stride, threads = logits.data_ptr(), logits.stride(0), self._num_threads
        return HeadInput(None, None, address, 0, stride, rows, vocab, 0, 4, threads, 1.0), logits

    def _products(self, hidden: Tensor, weight: PackedWeight, scale: LogitScale) -> Any:
        """The input of calls that multiply."""
        if (
            hidden.dtype != weight.dtype
            or hidden.shape[1:] != (weight.columns,)
            or hidden.stride(1) != 1
        ):
            raise ValueError(
                f"hidden rows must be {weight.dtype} [L, {weight.columns}] with whole rows, "
                f"not {hidden.dtype} {list(hidden.shape)}."
            )
        given = HeadInput(
            hidden.data_ptr(),
            weight.data_ptr(),
            None,
            hidden.stride(0),
            0,
            len(hidden),
            weight.rows,
            weight.columns,
            hidden.element_size(),
            self._num_threads,
            *scale,
        )
        given.codes = weight.codes
        return given


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
