"""`DraftTrainer`: draft heads trained on the policy's own samples, saved in formats of other
engines.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from nano_inference.arrays import dtype_name
from nano_inference.drafts.heads import (
    EagleSpec,
    HeadsSpec,
    MedusaSpec,
    mapped_ids,
    read_heads,
    read_named,
    table_of,
)
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import ConfigError
from nano_inference.models.decoder import Decoder
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ranks.parts import require_one_rank
from nano_inference.rl.draft_modules import PolicyRows, eagle_rows, medusa_rows
from nano_inference.rl.head_trainer import HeadTrainer, known_ids, require_places
from nano_inference.rl.tensors import numbers, torch_dtype
from nano_inference.system.regular_files import read_json
from nano_inference.types import TrainingSample

Kind = Literal["medusa", "eagle"]
INITIAL = 0.02  # standard deviation of new matrices
WEIGHTS = "model.safetensors"


class Heads(NamedTuple):
    """Heads to train.

    Attributes:
        spec: Description of the heads.
        known: Token ids of the policy that the heads know, int64.
        tensors: Parameters by name.
        config: Contents of config.json when the heads are saved.
    """

    spec: HeadsSpec
    known: Tensor
    tensors: dict[str, Tensor]
    config: dict[str, Any]


class DraftTrainer(HeadTrainer):
    """Medusa heads or an EAGLE-3 head, and their optimizer. The policy is frozen.

    Args:
        engine: Engine of the policy, on one rank.
        kind: `"medusa"`, or `"eagle"` for an EAGLE-3 head.
        places: Number of tokens ahead to draft. For Medusa: the number of heads.
        known_tokens: Token ids of the policy that the heads know. None: all. Fewer make drafts
            cheaper.
        learning_rate: Learning rate of AdamW.
        seed: Seed of new matrices and of the order of samples.
        heads: Existing heads to continue training, instead of new ones of this kind.

    Raises `ConfigError`.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        kind: Kind = "eagle",
        *,
        places: int = 3,
        known_tokens: Sequence[int] | None = None,
        learning_rate: float = 1e-3,
        seed: int = 0,
        heads: Heads | None = None,
    ) -> None:
        require_places(places)
        require_one_rank(engine.runner, "DraftTrainer")
        if engine.spec.state is not None:
            raise ConfigError(
                f"DraftTrainer does not support {engine.spec.architecture}: some of its layers "
                "carry a state."
            )
        if engine.spec.kinds:
            raise ConfigError(
                f"DraftTrainer does not support {engine.spec.architecture}: its layers are of "
                "several kinds."
            )
        generator = torch.Generator().manual_seed(seed)
        if heads is None:
            heads = _new_heads(engine, kind, places, known_tokens, generator)
        self.spec, known, tensors, self._config = heads
        if isinstance(self.spec, MedusaSpec):
            places = self.spec.num_heads
            if not self.spec.projections:
                raise ConfigError(
                    "cannot train heads that use the policy's projection; they need their own."
                )
        tensors = dict(tensors)
        self._embed_tokens = tensors.pop("embed_tokens.weight", None)  # frozen
        super().__init__(engine, tensors, known, places, learning_rate, generator)

    @classmethod
    def from_folder(
        cls,
        engine: InferenceEngine,
        folder: str | os.PathLike[str],
        *,
        places: int = 3,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> "DraftTrainer":
        """Continue training heads from a folder, such as those that the engine drafts with."""
        heads = _heads_of(engine, Path(folder))
        return cls(engine, places=places, learning_rate=learning_rate, seed=seed, heads=heads)

    # -- the heads ---------------------------------------------------------------------------------

    def _tapped(self) -> Sequence[int]:
        return self.spec.layer_ids if isinstance(self.spec, EagleSpec) else ()

    def _embedding(self) -> Tensor | None:
        if not isinstance(self.spec, EagleSpec) or self._embed_tokens is not None:
            return self._embed_tokens
        return numbers(self.engine.model.params["embed"]).float()

    def _draft_rows(self, rows: PolicyRows) -> list[Tensor]:
        if isinstance(self.spec, MedusaSpec):
            return medusa_rows(self.spec, self.params, rows, self.places)
        return eagle_rows(self.spec, self.params, rows, self.places)

    def _draft_logits(self, depth: int, hidden: Tensor, head: Tensor) -> Tensor:
        if isinstance(self.spec, EagleSpec):
            return functional.linear(hidden, self.params["lm_head.weight"])
        which = min(depth, self.spec.projections - 1)
        return functional.linear(hidden, self.params[f"lm_heads.{which}.weight"])

    # -- weights -----------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors by their public names, in the policy's dtype."""
        dtype = torch_dtype(self.engine.model.dtype)
        return {
            re.sub(r"^layers\.0\.", self._layer_name, name): param.detach().to(dtype)
            for name, param in self.params.items()
        }

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json and the tensors.

        Medusa heads are in vLLM's format, a new EAGLE-3 head in its authors' format, and heads
        from a folder in the format of that folder. Raises `ConfigError` if the folder already
        holds a model.
        """
        folder = Path(folder)
        if (folder / WEIGHTS).exists() or (folder / "config.json").exists():
            raise ConfigError(f"{folder} already holds a model; choose a new folder.")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.contiguous() for name, each in self.weights().items()}
        if self._embed_tokens is not None:
            tensors["embed_tokens.weight"] = self._embed_tokens.contiguous()
        tensors |= self._map()
        config = {**self._config, "torch_dtype": dtype_name(self.engine.model.dtype)}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        unfinished = folder / f"{WEIGHTS}.part"
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.replace(folder / WEIGHTS)

    @property
    def _layer_name(self) -> str:
        """Prefix of EAGLE-3's layer in the format of its folder."""
        return "layers.0." if "transformer_layer_config" in self._config else "midlayer."

    def _map(self) -> dict[str, Tensor]:
        vocab_size = self.engine.spec.vocab_size
        if len(self.known) == vocab_size:
            return {}
        if isinstance(self.spec, MedusaSpec):
            return {"token_map": self.known}
        known = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, self.known, True)
        return {"d2t": self.known - torch.arange(len(self.known)), "t2d": known}


def frequent_tokens(samples: Iterable[TrainingSample], count: int, vocab_size: int) -> list[int]:
    """Return the `count` most frequent ids of completions; among equals, the lower ones."""
    counts = Counter(token for each in samples for token in each.completion_tokens)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return sorted(ranked[:count])


def _new_heads(
    engine: InferenceEngine,
    kind: Kind,
    places: int,
    known_tokens: Sequence[int] | None,
    generator: torch.Generator,
) -> Heads:
    """Return new heads. Raises `ConfigError`."""
    if kind not in ("medusa", "eagle"):
        raise ConfigError(f"kind must be one of 'medusa', 'eagle'; got {kind!r}.")
    vocab_size = engine.spec.vocab_size
    if known_tokens is None:
        known = torch.arange(vocab_size)
    else:
        known = known_ids("known_tokens", known_tokens, vocab_size)
    spec = _new_spec(engine.spec, kind, places, len(known))
    tensors = _initial(engine.model, spec, known, generator)
    return Heads(spec, known, tensors, _config_of(spec, engine.spec, len(known)))


def _heads_of(engine: InferenceEngine, folder: Path) -> Heads:
    """Load the heads of a folder. Raises `ConfigError`."""
    spec = read_heads(folder, engine.spec)
    if spec is None:
        raise ConfigError(f"{folder} does not hold Medusa heads or an EAGLE-3 head.")
    tensors = read_named(folder, spec)
    stored = tensors.pop("map", None)
    known = torch.arange(engine.spec.vocab_size) if stored is None else mapped_ids(spec, stored)
    if isinstance(spec, MedusaSpec):
        return Heads(spec, known, tensors, _config_of(spec, engine.spec, len(known)))
    return Heads(spec, known, tensors, read_json(folder / "config.json"))


def _new_spec(policy: ModelSpec, kind: Kind, places: int, known: int) -> HeadsSpec:
    if kind == "medusa":
        return MedusaSpec(
            num_heads=places,
            num_blocks=1,
            hidden_size=policy.hidden_size,
            vocab_size=policy.vocab_size,
            draft_vocab_size=known,
            biases=False,
            projections=places,
        )
    count = policy.num_layers
    ids = (min(2, count - 1), count // 2, max(count - 3, 0))
    layer = spec_from_config({**_layer_config(policy), "architectures": ["LlamaForCausalLM"]})
    return EagleSpec(layer, policy.hidden_size, ids, known)


def _layer_config(policy: ModelSpec) -> dict[str, Any]:
    """Return the config of a plain layer with the policy's sizes."""
    return {
        "model_type": "llama",
        "hidden_size": policy.hidden_size,
        "intermediate_size": policy.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": policy.num_heads,
        "num_key_value_heads": policy.num_kv_heads,
        "head_dim": policy.head_dim,
        "vocab_size": policy.vocab_size,
        "max_position_embeddings": policy.max_position,
        "rms_norm_eps": policy.rms_norm_eps,
        "rope_theta": policy.ropes[-1].theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _initial(
    policy: Decoder, spec: HeadsSpec, known: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return new parameters by name.

    Projections start as copies of the policy's. Medusa's blocks start by adding nothing. The input
    of EAGLE-3's layer starts as mostly the last of the three taps.
    """
    head = numbers(policy.head).float()[known]
    params: dict[str, Tensor] = {}
    for source in (source for param in table_of(spec) for source in param.sources):
        if "lm_head" in source.name:
            params[source.name] = head.clone()
        elif source.name.startswith("blocks."):
            params[source.name] = torch.zeros(source.shape)
        elif len(source.shape) == 1:
            params[source.name] = torch.ones(source.shape)
        else:
            params[source.name] = torch.randn(source.shape, generator=generator) * INITIAL
    if isinstance(spec, EagleSpec):
        hidden = spec.layer.hidden_size
        params["fc.weight"][:, -hidden:] += torch.eye(hidden)
        norm = numbers(policy.params["norm"]).float()
        params["norm.weight"] = norm + policy.spec.norm_offset
    return params


def _config_of(spec: HeadsSpec, policy: ModelSpec, known: int) -> dict[str, Any]:
    if isinstance(spec, MedusaSpec):
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "num_heads": spec.num_heads,
            "num_hidden_layers": spec.num_blocks,
            "truncated_vocab_size": known,
            "medusa_fc_bias": spec.biases,
            "original_lm_head": spec.projections != spec.num_heads,
        }
    return {
        **_layer_config(policy),
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": spec.target_hidden_size,
        "draft_vocab_size": known,
        "eagle_aux_hidden_state_layer_ids": list(spec.layer_ids),
    }
