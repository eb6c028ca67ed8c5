"""Every kernel of a backend run once at the start, on a model of a layer or two, beside the
reference's.

A kernel that does not compile for this device, that faults, or that computes nonsense is found
before a request is.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nano_inference.device.kv_tensors import KVStorage
from nano_inference.errors import ConfigError, one_line
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.storage import allocate
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.cpu.build import KernelsUnavailable
from nano_inference.ops.interface import FEW_ROWS, Ops
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import DrawRequest, sampling_batch, to_device
from nano_inference.types import SamplingParams

VOCABULARY = 4096  # rows of the head at most
LENGTHS = (19, 1, 37)  # rows of the chunks, of which the second is a decode
CONTEXTS = (19, 90, 100)
TOLERANCE = 0.05  # of the norm of a result: kernels round where the reference does not
COMPARED = (
    "embed",
    "linear",
    "rms_norm",
    "rope_and_store",
    "attention",
    "gate",
    "moe",
    "logits",
    "gather_logprobs",
)
DRAWS = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0),
    SamplingParams(top_p=0.9, top_k=30),
)


class _Failed(Exception):
    """An operation raised, or is far from the reference."""


@torch.inference_mode()
def probe(
    ops: Ops, spec: ModelSpec, dtype: torch.dtype, device: torch.device, block_size: int
) -> None:
    """Run every operation of `ops` with the widths of a model, and compare it roughly with the
    reference.

    Raises `KernelsUnavailable` that names the operation which fails, and `ConfigError` where it
    leaves the device unusable.
    """
    tiny = _tiny(spec)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    try:
        _run(_beside(ops, reference_ops()), tiny, dtype, device, block_size)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{where} has no memory left to try the kernels on; use a card that is free."
        ) from None
    except Exception as problem:
        told = (
            f"on {where} {problem}"
            if isinstance(problem, _Failed)
            else f"on {where} they fail: {one_line(problem)}"
        )
        _require_usable(device, told)
        raise KernelsUnavailable(f"{told}.") from problem


def _tiny(spec: ModelSpec) -> ModelSpec:
    """The same widths in a layer of each kind, with few tokens and few experts."""
    moe = spec.moe
    mixed = moe.layers if moe is not None else (False,) * spec.num_layers
    kinds = list(dict.fromkeys(zip(spec.windows, mixed, spec.ropes, strict=True)))
    few = moe and replace(
        moe,
        num_experts=min(moe.num_experts, 2 * moe.experts_per_token)
        if moe.routing.groups == 1
        else moe.num_experts,
        layers=tuple(has_experts for _, has_experts, _ in kinds),
    )
    return replace(
        spec,
        num_layers=len(kinds),
        windows=tuple(window for window, _, _ in kinds),
        ropes=tuple(rope for _, _, rope in kinds),
        vocab_size=min(spec.vocab_size, VOCABULARY),
        max_position=256,
        moe=few,
    )


def _run(
    ops: Ops, spec: ModelSpec, dtype: torch.dtype, device: torch.device, block_size: int
) -> None:
    generator = torch.Generator(device).manual_seed(0)
    params = allocate(param_table(spec), dtype, device, ops.allocate)
    for param in params.values():
        _fill(param, generator)
    model = Decoder(spec, params, ops, spec.max_position)
    per_table = -(-max(CONTEXTS) // block_size)
    storage = KVStorage(spec, len(LENGTHS) * per_table, block_size, dtype, device)
    storage.keys.zero_()  # contexts begin before what is computed here
    storage.values.zero_()
    chunks = [
        Rows(
            [(7 * place) % spec.vocab_size for place in range(length)],
            context - length,
            _table(chunk, per_table),
        )
        for chunk, (length, context) in enumerate(zip(LENGTHS, CONTEXTS, strict=True))
    ]
    last = [sum(LENGTHS[: chunk + 1]) - 1 for chunk in range(len(LENGTHS))]
    batch = batch_of_rows(
        chunks, block_size, draws=last, scores=[(row, 1) for row in range(sum(LENGTHS))]
    )
    hidden = model.forward(to_device(batch, device), storage).hidden
    ops.sample_logits(model.logits(hidden), to_device(_draws(DRAWS), device))
    model.draw(hidden, to_device(_draws(DRAWS), device))
    # without filters there may be a shorter way
    model.draw(hidden, to_device(_draws(DRAWS[:1] * len(last)), device))
    if ops.few_rows is not None:
        for rows in (1, 2, FEW_ROWS):  # kernels are chosen by it
            decodes = [
                Rows([7], max(CONTEXTS) - row - 1, _table(0, per_table)) for row in range(rows)
            ]
            batch = to_device(batch_of_rows(decodes, block_size), device)
            expected = model.trunk(ops, batch, storage)
            _require_near(
                "few_rows",
                _called("few_rows", ops.few_rows, (model.trunk, batch, storage)),
                expected,
            )


def _draws(params: Iterable[SamplingParams]) -> Any:
    return sampling_batch([DrawRequest(each, row, (1, row, 5)) for row, each in enumerate(params)])


def _table(chunk: int, blocks: int) -> list[int]:
    return list(range(chunk * blocks, (chunk + 1) * blocks))


def _fill(param: Any, generator: torch.Generator) -> None:
    """Random weights that keep a row's size; norms are about 1."""
    shape = param.shape
    values = torch.randn(shape, generator=generator, device=param.device, dtype=torch.float32)
    values = values * shape[1] ** -0.5 if len(shape) == 2 else 1 + 0.1 * values
    param.copy_(values) if isinstance(param, Tensor) else param.write(0, values)


def _beside(ops: Ops, reference: Ops) -> Ops:
    """`ops`, where each one is compared with the reference's, which is called first."""
    compared = {
        name: _compared(name, getattr(ops, name), getattr(reference, name)) for name in COMPARED
    }
    compared["plan_attention"] = lambda *args: (
        _called("plan_attention", ops.plan_attention, args),
        reference.plan_attention(*args),
    )
    attend = _compared(
        "attention",
        lambda q, view, layer, plan, scores: ops.attention(q, view, layer, plan[0], scores),
        (lambda q, view, layer, plan, scores: reference.attention(q, view, layer, plan[1], scores)),
    )
    draws = {
        name: _drawn(name, getattr(ops, name), getattr(reference, name))
        for name in ("sample", "sample_logits")
    }
    return replace(ops, **compared | {"attention": attend} | draws)


def _compared(
    name: str, own: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        expected = reference(*[arg.clone() if isinstance(arg, Tensor) else arg for arg in args])
        found = _called(name, own, args)
        pairs = (
            zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        )
        for each, other in pairs:
            _require_near(name, each, other)
        return found

    return call


def _require_near(name: str, found: Tensor, expected: Tensor) -> None:
    error = float(
        (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6)
    )
    if not error <= TOLERANCE:  # also where it is NaN
        raise _Failed(f"{name} is wrong: it is {error:.2g} of its size away from the reference")


def _drawn(
    name: str, own: Callable[..., Draw], reference: Callable[..., Draw]
) -> Callable[..., Draw]:
    """Draws may differ where two tokens are about as good; what is reported of a token may not."""

    def call(*args: Any) -> Draw:
        expected, found = reference(*args), _called(name, own, args)
        same = found.token_ids == expected.token_ids
        apart = (found.logprobs - expected.logprobs)[same].abs()
        if 2 * int(same.sum()) < len(same) or not bool((apart < 0.1).all()):
            raise _Failed(
                f"{name} is wrong: it drew {found.token_ids.tolist()}, the reference "
                f"{expected.token_ids.tolist()}"
            )
        return found

    return call


def _called(name: str, own: Callable[..., Any], args: Any) -> Any:
    try:
        found = own(*args)
        if torch.cuda.is_available():
            # what fails in a kernel is told of here, and not by some later call
            torch.cuda.synchronize()
        return found
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        raise _Failed(f"{name} fails: {one_line(problem)}") from problem


def _require_usable(device: torch.device, told: str) -> None:
    """After an illegal access nothing runs on a device any more in this process."""
    try:
        torch.zeros(1, device=device).item()
    except Exception:
        raise ConfigError(
            f"the kernels are not available, {told}, and the device cannot be used in this "
            "process any more; start "
            "again with backend='reference'."
        ) from None
