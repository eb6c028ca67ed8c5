"""Drafts by the multi-token prediction layer of the policy's own checkpoint (`MtpSpec`).

The row of a position joins the embedding of the next token and the policy's hidden state. Each
further draft continues from the layer's own output, with the same weights. The names, the order of
the inputs and the choice between normed and raw states are those of vLLM's `deepseek_mtp.py`,
`glm4_moe_mtp.py`, `mimo_mtp.py`, `qwen3_next_mtp.py` and `qwen3_5_mtp.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listed
from typing import Any

from nano_inference.arrays import Tensor, dtype_name, of_kind
from nano_inference.core.sequence import Sequence
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.drafts.coded_copies import CodedCopies
from nano_inference.drafts.layer_drafts import LayerDrafts, side_by_side
from nano_inference.drafts.source import Guess
from nano_inference.errors import ConfigError
from nano_inference.models.blocks.attention import Attention
from nano_inference.models.blocks.build import build_layer, build_mixtures
from nano_inference.models.blocks.gated_attention import GatedAttention
from nano_inference.models.blocks.latent_attention import LatentAttention
from nano_inference.models.blocks.layer import Layer
from nano_inference.models.blocks.linear import Linear
from nano_inference.models.blocks.step import ModelPart, Step
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.mtp import mtp_table
from nano_inference.models.parameters.slots import Slot, slots
from nano_inference.models.parameters.values import WEIGHT_DTYPES, write
from nano_inference.models.sharding.rank_exchange import RankExchange
from nano_inference.models.sharding.shard import shard_of
from nano_inference.models.spec.mtp import PARAMS
from nano_inference.models.spec.mtp_layer import mtp_layer
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import KvcacheView, Operations, X
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import SamplingBatch


class MtpDrafts(LayerDrafts):
    """Drafts by a multi-token prediction layer.

    Its parameters are those of the policy that begin with `PARAMS`, so weight updates reach them.

    Args:
        policy: Model with these parameters, and with a tap after its last layer.
        storage, scratch: As in `LayerDrafts`.
        copies: Quantized copies of these parameters and of the head. None: the policy's own.
    """

    name = "mtp"

    def __init__(
        self,
        policy: Decoder,
        storage: KVStorage,
        scratch: Listed[int],
        copies: CodedCopies | None = None,
    ) -> None:
        assert policy.spec.mtp is not None
        super().__init__(policy, storage, scratch)
        spec, self._copies = mtp_layer(policy.spec), copies
        params = policy.params if copies is None else copies.params
        self.spec, self.part = policy.spec.mtp, _part_of(policy, params)
        self._head = params["embed" if policy.spec.tie_word_embeddings else "head"]
        layer = build_layer(self.part, 0, build_mixtures(self.part))
        assert isinstance(layer, Layer)
        assert isinstance(layer.mixer, Attention | GatedAttention | LatentAttention)
        self._layer, self._mixer = layer, layer.mixer
        self._project = Linear(self.part, "project")
        self._width, self._float32 = spec.hidden_size, self.part.float32

    @property
    def hidden_size(self) -> int:
        return self._width

    def combined(self, taps: Tensor) -> Tensor:
        if self.spec.reads_stream:
            return taps
        return self.policy.ops.rms_norm(None, taps, self.policy.norm, 1.0)[0].float()

    def store(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> X:
        normed = ops.rms_norm(None, self._joined(ops, batch, view), self._layer.mixer_norm, 1.0)[0]
        return self._mixer.store(self._step(ops, batch, view), normed)

    def layer(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> X:
        residual = self._joined(ops, batch, view)
        x, residual = self._layer(self._step(ops, batch, view), None, residual)
        return ops.rms_norm(x, residual, self.part.not_rounded, self._layer.scale)[0]

    def after(self, computed: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.policy.ops.rms_norm(None, computed, self.part.norm("norm"), 1.0)[0]
        return normed, computed if self.spec.feeds_stream else normed.float()

    def draw(self, rows: Tensor, batch: SamplingBatch) -> Draw:
        return self.policy.ops.sample(rows, self._head, self.policy.logit_scale, batch)

    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        if self._copies is not None:
            self._copies.follow()
        return super().propose(seqs, most)

    def _joined(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> X:
        """Return the layer's residual stream: embeddings and hidden states, joined."""
        policy, part, width = self.policy, self.part, self._width
        embedded = ops.embed(batch.input_ids, policy.params["embed"], policy.embed_scale)
        embedded = ops.rms_norm(None, embedded, part.norm("embed_norm"), 1.0)[0]
        hidden = ops.call(batch, self.give, (), width, self._float32)
        hidden = ops.rms_norm(None, hidden, part.norm("hidden_norm"), 1.0)[0]
        both = (hidden, embedded) if self.spec.hidden_first else (embedded, hidden)
        x = ops.call(batch, side_by_side, both, 2 * width, policy.dtype)
        x = self._project(self._step(ops, batch, view), x)
        return ops.call(batch, _widened, (x,), width, self._float32)

    def _step(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> Step[X]:
        plans = {0: ops.plan_attention(batch, view.block_size, 0)}
        return Step(ops, batch, view, plans, inputs=None, routes=None, taps=None)


class MtpWeights:
    """Parameters of a policy's multi-token prediction layer, to replace between two steps.

    Args:
        policy: Model with these parameters.
        copies: Quantized copies of them, which follow.
    """

    def __init__(self, policy: Decoder, copies: CodedCopies | None = None) -> None:
        self._policy, self._copies = policy, copies
        self._slots = slots(mtp_table(policy.part.whole))

    def replacing(self, weights: Iterable[tuple[str, Tensor]]) -> Callable[[], None]:
        """Check some parameters, given by their names in the checkpoint, and return the function
        that writes them. Raise `ConfigError` for a tensor that is not one of them.
        """
        new: list[tuple[Slot, Tensor]] = []
        for name, tensor in weights:
            slot = self._slots.get(name)
            if slot is None or tuple(tensor.shape) != slot.shape:
                reason = "is unknown" if slot is None else f"must have shape {slot.shape}"
                raise ConfigError(
                    f"the layer of multi-token prediction: tensor {name!r} of shape "
                    f"{tuple(tensor.shape)} {reason}."
                )
            if dtype_name(tensor.dtype) not in WEIGHT_DTYPES:
                raise ConfigError(
                    f"the layer of multi-token prediction: tensor {name!r} has dtype "
                    f"{dtype_name(tensor.dtype)}; send it unquantized."
                )
            new.append((slot, of_kind(self._policy.dtype, tensor)))

        def write_all() -> None:
            for slot, tensor in new:
                write(self._policy.params, slot, slot.take(tensor))
            if self._copies is not None:
                self._copies.write()

        return write_all


def _part_of(policy: Decoder, params: Mapping[str, Any]) -> ModelPart:
    """Return the layer's part of a policy's parameters, as a model of one layer."""
    spec = mtp_layer(policy.spec)
    return ModelPart(
        spec=spec,
        params={
            name.removeprefix(PARAMS): param
            for name, param in params.items()
            if name.startswith(PARAMS)
        },
        ops=policy.ops,
        exchange=RankExchange(shard_of(spec)),
        context=None,
        ropes=policy.ropes[-1:],
        dtype=policy.dtype,
        ones=None,
    )


def _widened(_batch: ForwardBatch, out: Tensor, x: Tensor) -> None:
    out.copy_(x)
