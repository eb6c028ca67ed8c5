"""The end of a step on the CPU: draws, scores and logits of hidden rows, each one call of the kernels in head.cpp."""

import ctypes
from ctypes import Structure, c_float, c_int, c_int64, c_void_p
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
        *((name, c_int64) for name in ("hidden_stride", "logits_stride", "num_rows", "vocab", "columns")),
        *((name, c_int64) for name in ("element_size", "num_threads")),
        ("divisor", c_float),
    )


class DrawBatch(Structure):
    """`DrawBatch` of head.h, its entries flattened."""

    _fields_ = (
        ("num_samples", c_int64),
        *((name, c_void_p) for name in ("rows", "temperature", "top_k", "top_p", "min_p")),
        *((name, c_void_p) for name in ("presence", "frequency", "repetition", "noise_keys")),
        *(
            field
            for kind in ("bias", "allowed", "counts")
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


def declare(kernels: ctypes.CDLL) -> None:
    """Say what the functions take and give."""
    for name, second in (("draw", c_void_p), ("score", c_void_p), ("logits", c_void_p)):
        function = getattr(kernels, f"nano_{name}")
        function.argtypes, function.restype = [c_void_p, second], c_int


def draw(
    kernels: Any, hidden: Tensor, weight: PackedWeight, divisor: float, batch: SamplingBatch, num_threads: int
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
    return _draw(kernels, _products(hidden, weight, divisor, num_threads), batch)


def draw_logits(kernels: Any, logits: Tensor, batch: SamplingBatch, num_threads: int) -> Draw:
    """The same from logits that are there already: float32 [L, V], divided by what they are to be divided by."""
    if logits.dtype != torch.float32 or logits.dim() != 2:
        raise ValueError(f"logits must be float32 [L, V], not {logits.dtype} {list(logits.shape)}.")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab = logits.shape
    given = HeadInput(None, None, logits.data_ptr(), 0, logits.stride(0), num_rows, vocab, 0, 4, num_threads, 1.0)
    return _draw(kernels, given, batch)


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

    It is to the bit what `draw` reports of that token: at temperature 1 as the raw logprob, at another as the logprob
    of a sample that was drawn there without filters.

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
    token_ids, temperatures = _plain(token_ids, torch.int64), _plain(temperatures, torch.float64)
    rows = torch.arange(len(token_ids))
    out = torch.empty(len(token_ids))
    targets = ScoreBatch(len(token_ids), rows.data_ptr(), token_ids.data_ptr(), temperatures.data_ptr(), out.data_ptr())
    given = _products(hidden, weight, divisor, num_threads)
    _check(kernels.nano_score(ctypes.addressof(given), ctypes.addressof(targets)), given)
    return out


def logits(kernels: Any, hidden: Tensor, weight: PackedWeight, divisor: float, num_threads: int) -> Tensor:
    """Products over the divisor, float32 [L, V]; arguments as in `draw`."""
    out = torch.empty((len(hidden), weight.rows))
    given = _products(hidden, weight, divisor, num_threads)
    _check(kernels.nano_logits(ctypes.addressof(given), out.data_ptr()), given)
    return out


def _products(hidden: Tensor, weight: PackedWeight, divisor: float, num_threads: int) -> HeadInput:
    if hidden.dtype != weight.dtype or hidden.shape[1:] != (weight.columns,) or hidden.stride(1) != 1:
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
    num, vocab = len(batch), given.vocab
    num_top = min(batch.most_top, vocab)
    parts = [  # kept alive until the call is over
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
    entries = [_plain_entries(each) for each in (batch.bias, batch.allowed, batch.counts)]
    restricted = _plain(batch.restricted, torch.bool)
    token_ids = torch.empty(num, dtype=torch.int64)
    logprobs, raw_logprobs, mass = torch.empty((3, num)).unbind()
    kept = torch.empty((num, vocab), dtype=torch.bool) if batch.any_mask and batch.any_filter else None
    top_ids = torch.empty((num, num_top), dtype=torch.int64)
    top_logprobs = torch.empty((num, num_top))
    request = DrawBatch(
        num,
        *(part.data_ptr() for part in parts),
        *(field for each in entries for field in (*(part.data_ptr() for part in each), len(each.ids))),
        restricted.data_ptr(),
        batch.any_raw,
        num_top,
        token_ids.data_ptr(),
        logprobs.data_ptr(),
        raw_logprobs.data_ptr(),
        mass.data_ptr(),
        None if kept is None else kept.data_ptr(),
        top_ids.data_ptr(),
        top_logprobs.data_ptr(),
    )
    _check(kernels.nano_draw(ctypes.addressof(given), ctypes.addressof(request)), given)
    return Draw(token_ids, logprobs, raw_logprobs, mass, kept, top_ids, top_logprobs)


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers as the kernels read them."""
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _plain_entries(entries: Entries) -> Entries:
    rows, ids, values = entries
    return Entries(_plain(rows, torch.int64), _plain(ids, torch.int64), _plain(values, torch.float32))


def _check(error: int, given: HeadInput) -> None:
    if error == _MEMORY:
        raise MemoryError("there is not enough memory for the logits of this step.")
    if error == _ROW:
        raise IndexError(f"a sample names a row that is not among the {given.num_rows} rows of this step.")
    if error == _ID:
        raise IndexError(f"a token id is not below the vocabulary's {given.vocab}.")
