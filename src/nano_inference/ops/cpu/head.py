"""The end of a step on the CPU: draws, scores and logits of hidden rows, one call of the kernels in
head.cpp each. Also draws and scores with a vocabulary that is sharded over ranks.
"""

import ctypes
from collections.abc import Generator
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple, cast

from nano_inference.arrays import Tensor, has_dtype, namespace
from nano_inference.ops.cpu.library import struct
from nano_inference.ops.cpu.weights import PackedWeight
from nano_inference.ops.interface import HeadParts, Weight
from nano_inference.sampling.logit_scale import UNSCALED, LogitScale
from nano_inference.sampling.parts import VocabPart
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import COLUMNS
from nano_inference.sampling.tensors import SamplingBatch

_MEMORY, _ROW, _ID = 1, 2, 3  # `HeadError` of head.h
BLOCK = 384  # VOCAB_BLOCK of filters.h
BEST = 32  # bytes of `Best` of noise.h

HeadInput, DrawBatch = struct("HeadInput"), struct("DrawBatch")
ScoreBatch, HeadPart = struct("ScoreBatch"), struct("HeadPart")


class Pointer(NamedTuple):
    """A field of `DrawBatch` that holds the address of a tensor of a `SamplingBatch`."""

    entries: str | None  # nested structure that contains the field, for `Entries`
    name: str
    dtype: str


def _pointers() -> list[Pointer]:
    pointers: list[Pointer] = []
    for name, column in COLUMNS.items():
        if column.sizes == ("E",):
            dtypes = {"rows": "int64", "ids": "int64", "values": column.dtype.name}
            pointers += [Pointer(name, part, dtype) for part, dtype in dtypes.items()]
        elif not column.on_host:
            pointers.append(Pointer(None, name, column.dtype.name))
    for pointer in pointers:  # ctypes would accept unknown names silently
        target = getattr(DrawBatch(), pointer.entries) if pointer.entries else DrawBatch()
        assert hasattr(target, pointer.name), (
            f"DrawBatch of head.h lacks {pointer.name} ({pointer.entries})"
        )
    return pointers


_POINTERS = _pointers()
_ENTRIES = tuple(dict.fromkeys(each.entries for each in _POINTERS if each.entries))
_tensors_of = attrgetter(
    *(f"{each.entries}.{each.name}" if each.entries else each.name for each in _POINTERS)
)
_RESULTS = tuple(each.name for each in fields(Draw))


class CpuHead:
    """The operations of `Ops` on hidden rows and logits, run by the kernels. No bit depends on the
    number of threads. Weights are [V, H], and hidden rows have their dtype.

    Raises:
        IndexError: A sample names a row or a token that does not exist.
        ValueError: Rows do not fit the weight, or logits are not float32 [L, V].
    """

    def __init__(self, kernels: Any, num_threads: int) -> None:
        self.kernels, self._num_threads = kernels, num_threads
        self.head_parts = HeadParts(BLOCK, self._sample_part, self._score_part)

    def sample(
        self, hidden: Tensor, weight: PackedWeight, scale: LogitScale, batch: SamplingBatch
    ) -> Draw:
        """Implement `Ops.sample`. The logits are not stored."""
        return self._draw(self._products(hidden, weight, scale), batch)

    def sample_logits(self, logits: Tensor, batch: SamplingBatch) -> Draw:
        head, _alive = self._given(logits)
        return self._draw(head, batch)

    def gather_logprobs(
        self,
        hidden: Tensor,
        weight: PackedWeight,
        scale: LogitScale,
        token_ids: Tensor,
        temperatures: Tensor,
    ) -> Tensor:
        """Implement `Ops.gather_logprobs`. At temperature 1 the result is the raw logprob, at other
        temperatures the logprob of a sample drawn without filters.
        """
        return self._score(self._products(hidden, weight, scale), token_ids, temperatures)

    def score_logits(self, logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> Tensor:
        head, _alive = self._given(logits)
        return self._score(head, token_ids, temperatures)

    def logits(self, hidden: Tensor, weight: PackedWeight, scale: LogitScale = UNSCALED) -> Tensor:
        head = self._products(hidden, weight, scale)
        out = namespace(hidden).empty((head.num_rows, head.vocab))
        check(self.kernels.nano_logits(ctypes.addressof(head), out.data_ptr()), head)
        return out

    def _draw(self, head: Any, batch: SamplingBatch) -> Draw:
        try:
            call = _idle.pop()
        except IndexError:  # all are in use by other threads, or none exists yet
            call = DrawCall()
        drawn = call.bind(batch, head.vocab)
        check(self.kernels.nano_draw(ctypes.addressof(head), call.address), head)
        _idle.append(call)
        return drawn

    def _score(self, head: Any, token_ids: Tensor, temperatures: Tensor) -> Tensor:
        targets = Targets(token_ids, temperatures)
        check(self.kernels.nano_score(ctypes.addressof(head), targets.address), head)
        return targets.logprobs

    def _sample_part(
        self,
        hidden: Tensor,
        weight: Weight,
        scale: LogitScale,
        batch: SamplingBatch,
        part: VocabPart,
    ) -> Generator[Tensor, list[Tensor], Draw]:
        call = DrawCall()
        drawn = call.bind(batch, part.vocab_size)
        head = _part_of(self._products(hidden, cast("PackedWeight", weight), scale), part)
        calls = self.kernels.nano_draw_part, self.kernels.nano_draw_whole
        yield from _exchange(calls, head, call.address, len(batch), part)
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
        targets = Targets(token_ids, temperatures)
        head = _part_of(self._products(hidden, cast("PackedWeight", weight), scale), part)
        calls = self.kernels.nano_score_part, self.kernels.nano_score_whole
        yield from _exchange(calls, head, targets.address, len(token_ids), part)
        return targets.logprobs

    def _given(self, logits: Tensor) -> tuple[Any, Tensor]:
        """Return the kernels' input for existing logits, and the tensor that it points to."""
        if not has_dtype(logits, "float32") or logits.dim() != 2:
            raise ValueError(
                f"logits must be float32 [L, V]; got {logits.dtype} {list(logits.shape)}."
            )
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, vocab = logits.shape
        address, stride, threads = logits.data_ptr(), logits.stride(0), self._num_threads
        return HeadInput(None, None, address, 0, stride, rows, vocab, 0, 4, threads, 1.0), logits

    def _products(self, hidden: Tensor, weight: PackedWeight, scale: LogitScale) -> Any:
        """Return the kernels' input for a product of hidden rows and the weight."""
        if (
            not has_dtype(hidden, weight.dtype)
            or hidden.shape[1:] != (weight.columns,)
            or hidden.stride(1) != 1
        ):
            raise ValueError(
                f"hidden rows must be {weight.dtype} [L, {weight.columns}] with adjacent columns; "
                f"got {hidden.dtype} {list(hidden.shape)}."
            )
        head = HeadInput(
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
        head.codes = weight.codes
        return head


class Targets:
    """A `ScoreBatch` with the memory that it points to, and the logprobs that a call fills."""

    def __init__(self, token_ids: Tensor, temperatures: Tensor) -> None:
        xp = namespace(token_ids)
        rows, self.logprobs = xp.arange(len(token_ids)), xp.empty(len(token_ids))
        token_ids, temperatures = (
            _plain(token_ids, "int64"),
            _plain(temperatures, "float64"),
        )
        self._alive = rows, token_ids, temperatures
        pointers = (tensor.data_ptr() for tensor in (*self._alive, self.logprobs))
        self._struct = ScoreBatch(len(token_ids), *pointers)
        self.address = ctypes.addressof(self._struct)


class DrawCall:
    """A reusable `DrawBatch` with the tensors that it points to. Only tensors that differ from the
    previous batch are rebound.
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
        """Bind the tensors of a batch. Return a new result that the call fills."""
        held = self._tensors
        for i, tensor in enumerate(_tensors_of(batch)):
            if tensor is not held[i]:
                held[i] = _plain(tensor, _POINTERS[i].dtype)
                setattr(self._places[i], _POINTERS[i].name, held[i].data_ptr())
        target = self._struct
        for name in _ENTRIES:
            getattr(target, name).count = len(getattr(batch, name).ids)
        target.num_samples, target.wants_raw = len(batch.rows), batch.any_raw
        target.num_masks, target.mask_width = batch.mask_words.shape
        drawn = _empty_draw(batch, vocab)
        target.num_top = drawn.top_ids.shape[1]
        for name in _RESULTS:
            tensor = getattr(drawn, name)
            setattr(target, name, None if tensor is None else tensor.data_ptr())
        return drawn


_idle: list[DrawCall] = []  # calls that no thread uses


def _empty_draw(batch: SamplingBatch, vocab: int) -> Draw:
    num, num_top = len(batch), min(batch.most_top, vocab)
    xp = namespace(batch.rows)
    logprobs, raw_logprobs, mass = xp.empty((3, num)).unbind()
    kept = xp.empty((num, vocab), dtype=xp.bool) if batch.any_kept and batch.any_filter else None
    top_ids = xp.empty((num, num_top), dtype=xp.int64)
    return Draw(
        xp.empty(num, dtype=xp.int64),
        logprobs,
        raw_logprobs,
        mass,
        kept,
        top_ids,
        xp.empty((num, num_top)),
        xp.empty((len(batch.named.ids), 2)),
    )


def _plain(tensor: Tensor, dtype: str) -> Tensor:
    """Return the same numbers in the dtype and layout that the kernels read."""
    if not has_dtype(tensor, dtype):
        tensor = tensor.to(getattr(namespace(tensor), dtype))
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def check(error: int, head: Any) -> None:
    """Raise the exception for a `HeadError`."""
    if error == _MEMORY:
        raise MemoryError("not enough memory for the logits of this step.")
    if error == _ROW:
        raise IndexError(f"a sample names a row outside the {head.num_rows} rows of this step.")
    if error == _ID:
        raise IndexError(f"a token id is outside the vocabulary of {head.whole or head.vocab}.")


def _part_of(head: Any, part: VocabPart) -> Any:
    if head.vocab != part.size:
        raise ValueError(
            f"the weight has {head.vocab} rows; rank {part.rank} holds {part.size} tokens."
        )
    head.first, head.whole = part.first, part.vocab_size
    return head


def _exchange(
    calls: tuple[Any, Any], head: Any, request: int, num: int, part: VocabPart
) -> Generator[Tensor, list[Tensor], None]:
    """Run both calls. Between them, yield this rank's statistics as bytes of equal length on every
    rank.
    """
    if num == 0:
        return
    counts = part.num_blocks(BLOCK)
    num_blocks, most = counts[part.rank], max(counts)
    import torch  # ranks exchange tensors

    statistics, best = (
        torch.empty((2, 3 * num * num_blocks)),
        torch.empty((num, BEST), dtype=torch.uint8),
    )
    local = HeadPart(statistics[0].data_ptr(), statistics[1].data_ptr(), best.data_ptr(), 0)
    check(calls[0](ctypes.addressof(head), request, ctypes.addressof(local)), head)
    views = local.num_views
    message = torch.zeros((2, views, most))
    message[:, :, :num_blocks] = statistics[:, : views * num_blocks].view(2, views, num_blocks)
    gathered = yield torch.cat([message.view(-1).view(torch.uint8), best.view(-1)])
    size = message.numel() * message.element_size()
    every = [each[:size].view(torch.float32).view(2, views, most) for each in gathered]
    whole = torch.cat(
        [each[:, :, :count] for each, count in zip(every, counts, strict=True)], dim=2
    ).contiguous()
    bests = torch.cat([each[size:] for each in gathered])
    parts = HeadPart(whole[0].data_ptr(), whole[1].data_ptr(), bests.data_ptr(), views)
    together = HeadInput(num_rows=head.num_rows, vocab=part.vocab_size, num_threads=1)
    check(
        calls[1](ctypes.addressof(together), request, ctypes.addressof(parts), len(gathered)),
        together,
    )
