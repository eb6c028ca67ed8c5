"""Tiny models of transformers with a multi-token prediction layer, as checkpoints store it, and the
layer's formula over transformers' modules.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.drafts.heads import drawn
from tests.models.families import DELTA, GLM4_MOE, LATENTS, NEXT
from tests.models.strong import TINY, rewrite_config, strong_model

VOCAB, HIDDEN = TINY["vocab_size"], TINY["hidden_size"]


@dataclass(frozen=True)
class Family:
    """How a family stores the layer, and what the layer reads.

    Attributes:
        class_name: Class of transformers.
        config: Settings of the class that override those of a tiny model.
        one_layer: Settings under which the class is a single layer like the predicting one.
        layer: Name of the decoder layer in the checkpoint.
        names: Names of the norm of the embedding, the norm of the hidden state, the product, and
            the last norm.
        extra: Keys of config.json that the class does not have.
        shared: Names of copies of the embedding and the head.
        hidden_first, reads_stream, feeds_stream: As in `MtpSpec`.
        norm_offset: Number that norms add to their weights.
    """

    class_name: str
    config: dict[str, Any]
    one_layer: dict[str, Any]
    layer: str
    names: tuple[str, str, str, str]
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    shared: tuple[str, ...] = ()
    hidden_first: bool = False
    reads_stream: bool = False
    feeds_stream: bool = False
    norm_offset: float = 0.0


QWEN_NAMES = (
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
)


def deepseek_names(last: int) -> tuple[str, str, str, str]:
    return (
        f"model.layers.{last}.enorm.weight",
        f"model.layers.{last}.hnorm.weight",
        f"model.layers.{last}.eh_proj.weight",
        f"model.layers.{last}.shared_head.norm.weight",
    )


def deepseek_shared(last: int) -> tuple[str, ...]:
    layer = f"model.layers.{last}"
    return f"{layer}.embed_tokens.weight", f"{layer}.shared_head.head.weight"


FULL = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
# what GLM-4.5, GLM-4.7-Flash and DeepSeek-V3 share
DEEPSEEK_LAYER = (
    {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "model.layers.3",
    deepseek_names(3),
    {"num_nextn_predict_layers": 1},
    deepseek_shared(3),
)
FAMILIES = {
    "qwen3.5": Family(
        "Qwen3_5ForCausalLM", DELTA, FULL, "mtp.layers.0", QWEN_NAMES, norm_offset=1.0
    ),
    "qwen3-next": Family(
        "Qwen3NextForCausalLM", NEXT, FULL, "mtp.layers.0", QWEN_NAMES, norm_offset=1.0
    ),
    "mimo": Family(
        "MiMoForCausalLM",
        {},
        {"num_hidden_layers": 1},
        "model.mtp_layers.0",
        (
            "model.mtp_layers.0.token_layernorm.weight",
            "model.mtp_layers.0.hidden_layernorm.weight",
            "model.mtp_layers.0.input_proj.weight",
            "model.mtp_layers.0.final_layernorm.weight",
        ),
        {"num_nextn_predict_layers": 1},
        hidden_first=True,
        reads_stream=True,
    ),
    "glm4-moe": Family(
        "Glm4MoeForCausalLM",
        GLM4_MOE | {"use_qk_norm": True, "attention_bias": True},
        *DEEPSEEK_LAYER,
        feeds_stream=True,
    ),
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        LATENTS,
        *DEEPSEEK_LAYER,
        feeds_stream=True,
    ),
    "glm4-moe-lite": Family(
        "Glm4MoeLiteForCausalLM",
        LATENTS | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
        *DEEPSEEK_LAYER[1:],
        feeds_stream=True,
    ),
}


class MtpModel:
    """A policy with a random multi-token prediction layer, saved into a folder.

    Attributes:
        folder: Folder of the policy.
        tensors: The layer's tensors by checkpoint name.
    """

    def __init__(self, folder: Path, family: Family) -> None:
        self.folder, self.family = folder / "policy", family
        self.policy = strong_model(self.folder, family.class_name, **family.config)
        config = {**family.config, "seed": 9} | family.one_layer
        self.layer = strong_model(folder / "layer", family.class_name, **config)
        stored = load_file(folder / "layer" / "model.safetensors")
        generator, hidden = torch.Generator().manual_seed(8), HIDDEN
        shapes = (hidden,), (hidden,), (hidden, 2 * hidden), (hidden,)
        self.own = [drawn(generator, *shape) for shape in shapes]
        self.own = [each - family.norm_offset if each.dim() == 1 else each for each in self.own]
        self.tensors = {
            name.replace("model.layers.0", family.layer): tensor
            for name, tensor in stored.items()
            if name.startswith("model.layers.0.")
        } | dict(zip(family.names, self.own, strict=True))
        state = self.policy.state_dict()
        copies = state["model.embed_tokens.weight"], state["lm_head.weight"]
        self.save(self.tensors | dict(zip(family.shared, copies, strict=bool(family.shared))))

    def save(self, tensors: dict[str, Tensor]) -> None:
        """Add tensors to the policy's file."""
        path = self.folder / "model.safetensors"
        copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(load_file(path) | copies, path, metadata={"format": "pt"})
        rewrite_config(self.folder, **self.family.extra)

    # -- the formula -------------------------------------------------------------------------------

    @torch.no_grad()
    def rows(self, token_ids: list[int], pick: Callable[[Tensor], int], count: int) -> list[Tensor]:
        """Return the normed rows [H] from which `count` drafts after these tokens are drawn.

        `pick` chooses a draft by the logits [V].
        """
        family, (embed_norm, hidden_norm, product, last_norm) = self.family, self.own
        stream, normed = self._states(self.policy, input_ids=torch.tensor([token_ids[:-1]]))
        hidden, behind = (stream if family.reads_stream else normed), token_ids[1:]
        rows: list[Tensor] = []
        for _ in range(count):
            embedded = self.policy.get_input_embeddings().weight[torch.tensor(behind)]
            both = [self._norm(embedded, embed_norm), self._norm(hidden, hidden_norm)]
            joined = torch.cat(both[::-1] if family.hidden_first else both, -1) @ product.T
            out = self._states(self.layer, inputs_embeds=joined[None])[0][-1]
            rows.append(self._norm(out, last_norm))
            behind = [*behind, pick(self.logits(rows[-1]))]
            hidden = torch.cat([hidden, (out if family.feeds_stream else rows[-1])[None]])
        return rows

    @torch.no_grad()
    def logits(self, row: Tensor) -> Tensor:
        """Return the logits [V] of a normed row [H]."""
        return self.policy.lm_head.weight @ row

    def _states(self, model: Any, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream after a model's last layer, and its norm: two of [N, H]."""
        taken: list[Tensor] = []
        hook = model.model.norm.register_forward_hook(
            lambda _, before, after: taken.extend((before[0][0], after[0]))
        )
        model.model(**inputs, use_cache=False)
        hook.remove()
        stream, normed = taken
        return stream, normed

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self.policy.config.rms_norm_eps
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return x * scale * (weight + self.family.norm_offset)
