"""Compile kernels at start-up that the first steps would otherwise compile while requests wait.

Triton compiles a kernel on its first launch with new constants, which takes most of a second. The
largest steps (`memory_profile`) and the graphs launch the kernels of every step. Draws have more
variants, which depend on the sampling parameters in a batch. The products of `batch_invariant` and
of weights in 8 bits are compiled for a few row counts. This module runs each variant once, with two
rows. Triton caches compiled kernels on disk, so later starts only load them.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.device.adapters import with_and_without_adapters
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.memory import longest_asked
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.table import param_table
from nano_inference.models.sharding.shard import shard_of
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.parallel.mesh import Place
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch, to_device
from nano_inference.types import SamplingParams

SAMPLES = 2

# Changes to logits: none, then bias and penalties, then masks and banned tokens.
_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"logit_bias": {0: -1.0}, "presence_penalty": 0.1, "repetition_penalty": 1.1},
    {"allowed_token_ids": frozenset({0, 1})},
)
_FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 50, "sampling_mask": True},
)
_SHOWN: tuple[dict[str, Any], ...] = ({}, {"top_logprobs": 5, "logprob_token_ids": (0, 1)})
# Raw logprobs: not reported, then requested by a sample, then reported for a greedy sample.
_BESIDE: tuple[dict[str, Any], ...] = ({}, {"raw_logprobs": True}, {"temperature": 0.0})


def kinds_of_draws() -> Iterator[SamplingBatch]:
    """Yield a batch for every variant that the sampling kernels are compiled for."""
    for changes, filters, shown, beside in product(_CHANGES, _FILTERS, _SHOWN, _BESIDE):
        params = SamplingParams(**changes, **filters, **shown)
        banned = (1,) if params.allowed_token_ids is not None else ()
        first = DrawRequest(params, 0, (0, 0, 1), prompt=[1], completion=[1], banned=banned)
        yield sampling_batch([first, DrawRequest(SamplingParams(**beside), 1, (0, 1, 1))])


@torch.inference_mode()
def run_all_kinds(
    config: EngineConfig, models: Mapping[str, Decoder], storages: Mapping[str, KVStorage]
) -> None:
    """Run each variant of a draw, and a step for each row count that has its own kernels."""
    longest = longest_asked(config, [model.spec for model in models.values()])
    for name, model in models.items():
        hidden = torch.zeros(
            (SAMPLES, model.spec.hidden_size), dtype=model.dtype, device=model.device
        )
        for batch in kinds_of_draws() if model.is_last_stage else ():
            model.draw(hidden, to_device(batch, model.device))
        for rows in kinds_of_steps(config, model):
            batch = _step(rows, longest, config.block_size, name)
            for variant in with_and_without_adapters(config, model, batch):
                model.forward(to_device(variant, model.device), storages[name])


def kinds_of_steps(config: EngineConfig, model: Decoder) -> list[int]:
    """Return the row counts that have their own kernels on some rank. All ranks run each step."""
    most = config.max_tokens_per_batch
    if model.ops.name != "cuda":
        return [min(most, 64)]
    from nano_inference.ops.cuda.matmul import kinds_of_rows  # brings in Triton
    from nano_inference.ops.cuda.quantised import KINDS_OF_ROWS, AlignedWeight

    counts = set[int]() if model.ops.schedule_invariant else {min(most, 64)}
    codes = {each.form.floats for each in model.params.values() if isinstance(each, AlignedWeight)}
    if config.quantization is not None and model.part.position.mesh.world_size > 1:
        codes = {False, True}  # other ranks may hold layers in other formats
    if False in codes:
        counts.update(min(most, rows) for rows in KINDS_OF_ROWS)
    if model.ops.schedule_invariant or True in codes:
        for columns, depth, dtype in _matrices(model):
            counts.update(kinds_of_rows(columns, depth, dtype, most, model.device))
    return sorted(counts)


def _matrices(model: Decoder) -> set[tuple[int, int, torch.dtype]]:
    """Return rows, columns and dtypes of the matrices of all ranks that `matmul` multiplies."""
    mesh, whole = model.part.position.mesh, model.part.whole
    if mesh.world_size == 1:
        plain = model.ops.schedule_invariant
        return {
            (each.shape[0], each.shape[1], each.dtype)
            for each in model.params.values()
            if len(each.shape) == 2 and (plain if isinstance(each, Tensor) else each.form.floats)
        }
    parts = (shard_of(whole, Place(mesh, rank)) for rank in range(mesh.world_size))
    return {
        (param.shape[0], param.shape[1], torch.float32 if param.keep_float32 else model.dtype)
        for part in parts
        for param in param_table(whole, part)
        if len(param.shape) == 2
    }


def _step(rows: int, longest: int, block_size: int, weight_set: str) -> ForwardBatch:
    """Return a decode, and prompts of up to `longest` tokens for the other rows, in one block."""
    lengths = [min(longest, rows - 1 - done) for done in range(0, rows - 1, longest)]
    position = min(block_size, longest - 1)
    chunks = [Rows([0], position, [0] * (position // block_size + 1))]
    chunks += [Rows([0] * length, 0, [0] * -(-length // block_size)) for length in lengths]
    ends = accumulate(len(chunk.token_ids) for chunk in chunks)
    draws = [end - 1 for end in ends]
    return batch_of_rows(chunks, block_size, draws=draws, weight_set=weight_set)
