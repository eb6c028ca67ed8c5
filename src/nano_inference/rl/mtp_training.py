"""`MtpTrainer`: the policy's layer of multi-token prediction, trained on its own samples."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.arrays import as_torch
from nano_inference.core.sequence import POLICY
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import ConfigError
from nano_inference.models.parameters.mtp import mtp_table, whole_table
from nano_inference.models.parameters.param import ParamSpec
from nano_inference.models.parameters.slots import Slot, slots
from nano_inference.models.parameters.values import read
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.mtp import PARAMS, MtpSpec
from nano_inference.models.spec.mtp_layer import mtp_layer
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.ranks.parts import require_one_rank
from nano_inference.rl.checkpoint import as_stored, require_savable, save_checkpoint
from nano_inference.rl.draft_modules import PolicyRows, attend_by_depth
from nano_inference.rl.head_trainer import HeadTrainer, known_ids, require_places
from nano_inference.rl.scoring_module import require_chosen_codes
from nano_inference.rl.tensors import numbers, rotation, torch_dtype
from nano_inference.rl.torch_decoder import TorchDecoder
from nano_inference.sampling.scaling import scaled

_LAYER = "layers.0."


class MtpTrainer(HeadTrainer):
    """The policy's layer of multi-token prediction, and its optimizer. The policy is frozen.

    The layer is trained at several depths, at each of which it reads its own output of the depth
    before, as when it drafts (DeepSeek-V3, arXiv:2412.19437, section 2.2, with one layer for all
    depths). Only layers with a dense MLP are supported: those of MiMo and Qwen3.5.

    Args:
        engine: Engine of the policy with `draft_model="mtp"`, on one rank.
        places: Number of tokens ahead to draft.
        learned_tokens: Token ids over which the loss compares distributions, such as the most
            frequent ones. Fewer make training cheaper. None: all.
        learning_rate: Learning rate of AdamW.
        seed: Seed of the order of samples.

    Raises `ConfigError`.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        places: int = 3,
        learned_tokens: Sequence[int] | None = None,
        learning_rate: float = 1e-4,
        seed: int = 0,
    ) -> None:
        require_places(places)
        require_one_rank(engine.runner, "MtpTrainer")
        require_chosen_codes(engine, "MtpTrainer")
        _require_trainable(engine.spec)
        self._table = mtp_table(engine.spec)
        self._module = MtpModule(engine)
        self._slots = slots(self._table)
        params = {
            name: as_torch(read(engine.model.params, slot)).float().clone()
            for name, slot in self._slots.items()
        }
        known = torch.arange(engine.spec.vocab_size)
        generator = torch.Generator().manual_seed(seed)
        super().__init__(engine, params, known, places, learning_rate, generator)
        if learned_tokens is not None:
            self.learned = known_ids("learned_tokens", learned_tokens, engine.spec.vocab_size)

    def _tapped(self) -> Sequence[int]:
        return (self.engine.spec.num_layers,) if self._module.mtp.reads_stream else ()

    def _embedding(self) -> Tensor:
        policy = self.engine.model
        return numbers(policy.params["embed"]).float() * policy.embed_scale

    def _draft_rows(self, rows: PolicyRows) -> list[Tensor]:
        return self._module.rows(joined(self.params, self._table), rows, self.places)

    def _draft_logits(self, depth: int, hidden: Tensor, head: Tensor) -> Tensor:
        return scaled(functional.linear(hidden, head), self.engine.spec.logit_scale)

    def weights(self) -> dict[str, Tensor]:
        dtype = torch_dtype(self.engine.model.dtype)
        kept = {each.name for row in self._table if row.keep_float32 for each in row.sources}
        return {
            name: whole(slot, param.detach().to(torch.float32 if name in kept else dtype))
            for (name, slot), param in zip(self._slots.items(), self.params.values(), strict=True)
        }

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint of the policy with the trained layer.

        Raises `ConfigError` if the folder already holds a model, or if the policy's checkpoints
        hold more than the text model's tensors.
        """
        engine, model = self.engine, self.engine.model
        require_savable(engine.model_folder, engine.spec)
        table = whole_table(engine.spec)
        tensors: dict[str, Tensor] = {}

        def take() -> None:
            for name, slot in slots(table).items():
                tensors[name] = whole(slot, as_torch(read(model.params, slot)))

        engine.shared.between_steps(POLICY, take)
        stored = as_stored(tensors | self.weights(), engine.spec, table)
        save_checkpoint(Path(folder), engine.model_folder, stored, torch_dtype(model.dtype))


class MtpModule(TorchDecoder):
    """The layer in differentiable torch, over whole sequences. Parameters are float32."""

    def __init__(self, engine: InferenceEngine) -> None:
        policy = engine.model
        assert policy.spec.mtp is not None
        self.mtp: MtpSpec = policy.spec.mtp
        ropes = [rotation(policy.ropes[-1])]
        kept = KvFormat(torch.float32)
        super().__init__(mtp_layer(policy.spec), ropes, policy.embed_scale, torch.float32, kept)

    def rows(self, params: Mapping[str, Tensor], rows: PolicyRows, places: int) -> list[Tensor]:
        """Return the rows that the head reads by depth, as `eagle_rows` does."""
        count = len(rows.token_ids) - 1  # rows whose next token is known
        hidden = (rows.taps if self.mtp.reads_stream else rows.hidden)[:count]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        by_depth: list[Tensor] = []
        for depth in range(min(places, count)):
            hidden = hidden[: count - depth]
            embedded = rows.embedded[1 + depth : 1 + count]
            embedded = self._normed(embedded, params["embed_norm"])
            hidden = self._normed(hidden, params["hidden_norm"])
            both = (hidden, embedded) if self.mtp.hidden_first else (embedded, hidden)
            x = functional.linear(torch.cat(both, dim=1), params["project"])
            out = self._one_layer(x, params, depth, keys, values)
            normed = self._normed(out, params["norm"])
            start, stop = rows.targets(depth)
            by_depth.append(normed[start - 1 - depth : max(stop - 1 - depth, 0)])
            hidden = out if self.mtp.feeds_stream else normed
        return by_depth

    def _one_layer(
        self,
        residual: Tensor,
        params: Mapping[str, Tensor],
        depth: int,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """Compute rows [N, H], `depth` positions after their bases, as `_layer` does at depth 0.

        The lists hold keys and values of the previous depths and receive those of this one.
        """
        spec, width = self.spec, self.spec.num_heads * self.spec.head_dim
        normed = self._norm(residual, params.get(_LAYER + "attn_norm"))
        made, gate = self._linear(normed, params, _LAYER + "qkv"), None
        if spec.gated_attention:
            gate, made = made.tensor_split([width], dim=-1)
        q, rest = made.tensor_split([width], dim=-1)
        places = torch.arange(depth, depth + len(q))
        q = self._turned(q, params, _LAYER + "q_norm", 0, places)
        k, v = self._keys_and_values(rest, params, _LAYER, 0, places)
        keys.append(k.transpose(0, 1))
        values.append(v.transpose(0, 1))
        attended = attend_by_depth(q.transpose(0, 1), keys, values, spec.attention_scale)
        if gate is not None:
            attended = attended * gate.sigmoid()
        x = self._linear(attended, params, _LAYER + "o")
        residual = residual + self._after(x, params.get(_LAYER + "attn_out_norm"))
        normed = self._norm(residual, params.get(_LAYER + "mlp_norm"))
        x = self._mlp(normed, params, _LAYER, None)
        return residual + self._after(x, params.get(_LAYER + "mlp_out_norm"))


def whole(slot: Slot, held: Tensor) -> Tensor:
    """Return a copy of a checkpoint tensor from the part that an engine holds."""
    tensor = torch.empty(slot.shape, dtype=held.dtype)
    slot.put(tensor, held)
    return tensor


def joined(params: Mapping[str, Tensor], table: Sequence[ParamSpec]) -> dict[str, Tensor]:
    """Return the decoder's parameters, without `PARAMS`, from those by checkpoint name."""
    by_name: dict[str, Tensor] = {}
    for row in table:
        parts = [params[each.name] for each in row.sources]
        by_name[row.name.removeprefix(PARAMS)] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return by_name


def _require_trainable(spec: ModelSpec) -> None:
    """Raise `ConfigError` unless `MtpModule` computes the layer of this model."""
    if spec.mtp is None:
        raise ConfigError(
            "MtpTrainer trains the layer that draft_model='mtp' loads; build the engine with it."
        )
    for reason, is_so in (
        ("has experts", spec.moe is not None),
        ("attends to latents", spec.latent is not None),
        ("has attention sinks", spec.attention_sinks),
        ("caps attention scores", bool(spec.attention_cap)),
    ):
        if is_so:
            raise ConfigError(
                f"MtpTrainer does not support {spec.architecture}, whose layer {reason}."
            )
