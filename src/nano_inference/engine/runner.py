"""`ModelRunner`: runs batches on one device, one forward a weight set, and draws the samples."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from nano_inference.batch import ForwardBatch
from nano_inference.engine.storage import KVStorage
from nano_inference.models.decoder import Decoder, model_forward
from nano_inference.sampling.sample import Draw, SamplingBatch
from nano_inference.scheduling.commit import SampledTokens

Batch = TypeVar("Batch", ForwardBatch, SamplingBatch)


class Sampled:
    """Samples of a step, maybe still being computed on the device."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def wait(self) -> SampledTokens:
        """The samples on the host. The only place where the host waits for the device."""
        draw = self.draw
        masks = None
        if draw.kept is not None:
            masks = [tuple(row.nonzero()[:, 0].tolist()) for row in draw.kept.cpu()]
        return SampledTokens(
            token_ids=draw.token_ids.tolist(),
            logprobs=draw.logprobs.tolist(),
            raw_logprobs=draw.raw_logprobs.tolist(),
            log_kept_mass=draw.log_kept_mass.tolist(),
            masks=masks,
        )


class ModelRunner:
    """Owns the models by weight set and the KV tensors. Counts what goes through the forward."""

    def __init__(self, models: Mapping[str, Decoder], storage: KVStorage) -> None:
        self.models = dict(models)
        self.storage = storage
        self.device = storage.keys.device
        self.tokens_computed = 0
        self.prompt_tokens_computed = 0

    def forward(
        self,
        batches: tuple[ForwardBatch, ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: Sampled | None,
    ) -> Tensor:
        """Copy blocks, then compute every batch; returns their logits one after another, float32 [L, V]."""
        if block_copies:
            self.storage.copy_blocks(block_copies)
        return torch.cat([self._forward_one(_to_device(batch, self.device), previous) for batch in batches])

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Draw the samples of a step."""
        ops = next(iter(self.models.values())).ops
        return Sampled(ops.sample(logits, _to_device(batch, self.device)))

    def _forward_one(self, batch: ForwardBatch, previous: Sampled | None) -> Tensor:
        if len(batch.relay_rows):
            if previous is None:
                raise RuntimeError("a row waits for a token that no step in flight is sampling.")
            batch.input_ids[batch.relay_rows] = previous.draw.token_ids[batch.relay_sources]
        self.tokens_computed += len(batch.input_ids)
        self.prompt_tokens_computed += batch.num_prompt_tokens
        return model_forward(self.models[batch.weight_set], batch, self.storage)


def _to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch with its tensors on another device."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved = {name: v.to(device, non_blocking=True) for name, v in values.items() if isinstance(v, Tensor)}
    return replace(batch, **moved)
