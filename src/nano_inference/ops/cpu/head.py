"""The end of a step on the CPU: draws, scores and logits of hidden rows, each one call of the
kernels in head.cpp.
"""

import ctypes
from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import Entries, SamplingBatch

_MEMORY, _ROW, _ID = 1, 2, 3  # `HeadError` of head.h


class PackedWeight(Protocol):
    """A weight [rows, columns] as linear.h lays it out."""

    rows: int
    columns: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Where its panels lie."""
        ...


class HeadInput(Structure):
    """`HeadInput` of head.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("hidden", "weight", "logits")),
        *(
            (name, c_int64)
            for name in ("hidden_stride", "logits_stride", "num_rows", "vocab", "columns")
        ),
        *((name, c_int64) for name in ("element_size", "num_threads")),
        ("divisor", c_float),
        ("first", c_int64),
        ("whole", c_int64),
    )


class DrawBatch(Structure):
    """`DrawBatch` of head.h, its entries flattened."""

    _fields_ = (
        ("num_samples", c_int64),
        *((name, c_void_p) for name in ("rows", "temperature", "top_k", "top_p", "min_p")),
        *((name, c_void_p) for name in ("presence", "frequency", "repetition", "noise_keys")),
        *(
            field
            for kind in ("bias", "allowed", "banned", "counts")
            for field in (
                *((f"{kind}_{part}", c_void_p) for part in ("rows", "ids", "values")),
                (f"{kind}_count", c_int64),
            )
        ),
        ("restricted", c_void_p),
        ("wants_raw", c_int64),
        ("num_top", c_int64),
        *((name, c_void_p) for name in ("token_ids", "logprobs", "raw_logprobs", "log_kept_mass")),
        *((name, c_void_p) for name in ("kept", "top_ids", "top_logprobs")),
    )


class ScoreBatch(Structure):
    """`ScoreBatch` of head.h."""

    _fields_ = (
        ("num_samples", c_int64),
        ("rows", c_void_p),
        ("token_ids", c_void_p),
        ("temperatures", c_void_p),
        ("logprobs", c_void_p),
    )


class HeadPart(Structure):
    """`HeadPart` of head.h."""

    _fields_ = (
        ("maxima", c_void_p),
        ("sums", c_void_p),
        ("best", c_void_p),
        ("num_views", c_int64),
    )


def declare(kernels: ctypes.CDLL) -> None:
    """Say what the functions take and give."""
    for name, second in (("draw", c_void_p), ("score", c_void_p), ("logits", c_void_p)):
        function = getattr(kernels, f"nano_{name}")
        function.argtypes, function.restype = [c_void_p, second], c_int
    for name in ("draw", "score"):
        for step, arguments in (("part", [c_void_p] * 3), ("whole", [c_void_p] * 3 + [c_int64])):
            function = getattr(kernels, f"nano_{name}_{step}")
            function.argtypes, function.restype = arguments, c_int


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
        kernels: the library, after `declare`.
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


def _given(logits: Tensor, num_threads: int) -> tuple[HeadInput, Tensor]:
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


def products(hidden: Tensor, weight: PackedWeight, divisor: float, num_threads: int) -> HeadInput:
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


def _draw(kernels: Any, given: HeadInput, batch: SamplingBatch) -> Draw:
    request = Request(batch, given.vocab)
    check(kernels.nano_draw(ctypes.addressof(given), request.address), given)
    return request.draw


class Targets:
    """A `ScoreBatch` with the memory that it points to, and the logprobs that it fills."""

    def __init__(self, token_ids: Tensor, temperatures: Tensor) -> None:
        token_ids, temperatures = (
            _plain(token_ids, torch.int64),
            _plain(temperatures, torch.float64),
        )
        rows, self.logprobs = torch.arange(len(token_ids)), torch.empty(len(token_ids))
        self._alive = token_ids, temperatures, rows
        pointers = (tensor.data_ptr() for tensor in (rows, token_ids, temperatures, self.logprobs))
        self._struct = ScoreBatch(len(token_ids), *pointers)
        self.address = ctypes.addressof(self._struct)


class Request:
    """A `DrawBatch` with the memory that it points to, and the `Draw` that it fills."""

    def __init__(self, batch: SamplingBatch, vocab: int) -> None:
        parts = [
            _plain(batch.rows, torch.int64),
            _plain(batch.temperature, torch.float64),
            _plain(batch.top_k, torch.int64),
            _plain(batch.top_p, torch.float32),
            _plain(batch.min_p, torch.float32),
            _plain(batch.presence, torch.float32),
            _plain(batch.frequency, torch.float32),
            _plain(batch.repetition, torch.float32),
            _plain(batch.noise_keys, torch.int64),
        ]
        entries = [
            _plain_entries(each) for each in (batch.bias, batch.allowed, batch.banned, batch.counts)
        ]
        restricted = _plain(batch.restricted, torch.bool)
        self._alive = parts, entries, restricted
        self.draw = _empty_draw(batch, vocab)
        self._struct = DrawBatch(
            len(batch),
            *(part.data_ptr() for part in parts),
            *(
                field
                for each in entries
                for field in (*(part.data_ptr() for part in each), len(each.ids))
            ),
            restricted.data_ptr(),
            batch.any_raw,
            self.draw.top_ids.shape[1],
            *(
                None if tensor is None else tensor.data_ptr()
                for tensor in (getattr(self.draw, field.name) for field in fields(Draw))
            ),
        )
        self.address = ctypes.addressof(self._struct)


def _empty_draw(batch: SamplingBatch, vocab: int) -> Draw:
    num, num_top = len(batch), min(batch.most_top, vocab)
    logprobs, raw_logprobs, mass = torch.empty((3, num)).unbind()
    kept = (
        torch.empty((num, vocab), dtype=torch.bool) if batch.any_mask and batch.any_filter else None
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


def _plain_entries(entries: Entries) -> Entries:
    rows, ids, values = entries
    return Entries(
        _plain(rows, torch.int64), _plain(ids, torch.int64), _plain(values, torch.float32)
    )


def check(error: int, given: HeadInput) -> None:
    """Raise what a `HeadError` means."""
    if error == _MEMORY:
        raise MemoryError("there is not enough memory for the logits of this step.")
    if error == _ROW:
        raise IndexError(
            f"a sample names a row that is not among the {given.num_rows} rows of this step."
        )
    if error == _ID:
        raise IndexError(f"a token id is not below the vocabulary's {given.whole or given.vocab}.")
