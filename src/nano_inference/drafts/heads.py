"""Draft heads, which guess a model's next tokens from its own hidden rows: Medusa and EAGLE-3.

A folder holds config.json and safetensors. Several published naming schemes are accepted. Medusa:
the names of vLLM (`medusa_heads.blocks.0...`, `lm_heads.0.weight`, `token_map`) and of the authors
(`0.0.linear.weight`). EAGLE-3: the names of the authors (`midlayer...`), of SGLang and vLLM, and of
speculators (`layers.0...`), with `d2t` if the head has a vocabulary of its own.

Papers: Medusa, Cai et al. 2024, arXiv 2401.10774; EAGLE-3, Li et al. 2025, arXiv 2503.01840.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nano_inference.arrays import HOST, Device, Dtype, Tensor, dtype_name, namespace, of_kind
from nano_inference.checkpoints.loading import read_tensors, stored_shapes
from nano_inference.errors import ConfigError, ModelLoadError
from nano_inference.models.parameters.param import ParamSpec, Source
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.storage import Allocate, allocate, num_bytes
from nano_inference.models.parameters.values import WEIGHT_DTYPES, write
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.read import spec_from_config
from nano_inference.system.regular_files import read_json

EAGLE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
MEDUSA = ("MedusaModel",)
# Defaults for speculators' `transformer_layer_config`, which omits defaults of transformers.
_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
        },
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        },
    ),
}
# Unused tensors, stored for training or for other engines.
_UNREAD = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "mask_hidden")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    """Medusa heads: each has a few residual blocks on the last hidden row, and a projection.

    Attributes:
        num_heads: Number of heads, which is the number of tokens that they guess ahead.
        num_blocks: Residual blocks of each head.
        hidden_size, vocab_size: Sizes of the policy.
        draft_vocab_size: Number of tokens that the heads can guess. If it is less than
            `vocab_size`, `token_map` lists them.
        biases: True if the blocks have biases.
        projections: Number of projections stored with the heads: one for each head, one for all, or
            0 to use the policy's.
    """

    num_heads: int
    num_blocks: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    biases: bool
    projections: int


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """An EAGLE-3 head: one layer over embeddings and the policy's activations at three layers.

    Attributes:
        layer: Sizes of the head, as a model of one layer.
        target_hidden_size: Hidden size of the policy.
        layer_ids: Layers of the policy before which the residual stream is read.
        draft_vocab_size: Number of tokens that the head can guess. If it is less than the policy's
            vocabulary, `d2t` lists them.
        norm_before_residual: True if the residual is taken after the norm.
        norm_before_fc, fc_norm: True if the policy's activations are normed together, or layer by
            layer.
        norm_output: True if the next guess continues from the normed row.
        has_embedding: True if the head has an embedding of its own. Otherwise it uses the policy's.
    """

    layer: ModelSpec
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_embedding: bool = False


HeadsSpec = MedusaSpec | EagleSpec


def heads_kind(config: Mapping[str, Any]) -> str | None:
    """Return `"medusa"`, `"eagle"`, or None if a config.json describes no draft heads."""
    names = config.get("architectures") or ()
    if any(name in EAGLE for name in names) or "draft_vocab_size" in config:
        return "eagle"
    is_medusa = any(name in MEDUSA for name in names) or config.get("model_type") == "medusa"
    return "medusa" if is_medusa or (not names and "medusa_num_heads" in config) else None


def read_heads(folder: Path, policy: ModelSpec) -> HeadsSpec | None:
    """Return the spec of the heads in a folder, or None if it holds no heads.

    Raise `ConfigError` if the heads do not fit the policy or are not supported, and
    `ModelLoadError` if they cannot be read.
    """
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    kind = heads_kind(config)
    if kind is None:
        return None
    stored = stored_shapes(folder)
    try:
        num_blocks = int(config.get("medusa_num_layers") or 1)
        shapes = {canonical(kind, name, num_blocks): shape for name, shape in stored.items()}
        spec = (
            _medusa(folder, config, shapes, policy)
            if kind == "medusa"
            else _eagle(folder, config, shapes, policy)
        )
    except ConfigError:  # also a ValueError
        raise
    except (AttributeError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"draft_model: {folder}: config.json has a value of the wrong type: {problem}."
        ) from problem
    for name, slot in slots(table_of(spec)).items():
        _require_shape(folder, name, shapes, slot.shape)
    if spec.draft_vocab_size != policy.vocab_size:
        _require_shape(folder, "map", shapes, (spec.draft_vocab_size,))
    return spec


def canonical(kind: str, name: str, num_blocks: int) -> str:
    """Return the canonical name of a tensor that has several public names."""
    if kind == "eagle":
        name = name.removeprefix("model.")
        name = re.sub(r"^midlayer\.", "layers.0.", name)
        return "map" if name == "d2t" else name
    name = re.sub(r"^medusa_heads?\.", "", name)
    renamed = {"token_map": "map", "lm_head.weight": "lm_heads.0.weight"}
    if name in renamed:
        return renamed[name]
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return "blocks.{}.layers.{}.{}".format(*match.groups())
    if match := re.fullmatch(r"(\d+)\.(\d+)\.weight", name):
        head, index = map(int, match.groups())
        return f"lm_heads.{head}.weight" if index == num_blocks else name
    return name


def name_in(spec: HeadsSpec, public: str) -> str:
    """Return the canonical name of a tensor of these heads."""
    if isinstance(spec, MedusaSpec):
        return canonical("medusa", public, spec.num_blocks)
    return canonical("eagle", public, 1)


def table_of(spec: HeadsSpec) -> tuple[ParamSpec, ...]:
    """Return all parameters of the heads. Their sources have canonical names."""
    return _medusa_table(spec) if isinstance(spec, MedusaSpec) else _eagle_table(spec)


class NewHeads(NamedTuple):
    """Checked parameters by canonical name, and the policy's ids of the tokens to guess."""

    params: dict[str, Tensor]
    targets: Tensor | None


class HeadWeights:
    """Parameters of draft heads.

    Args:
        spec: Spec of the heads.
        dtype, device: Type and device of the policy.
        matrix: Allocates a matrix in the layout of the backend.

    Attributes:
        params: Parameters by name.
        targets: The policy's id of each token that the heads can guess, int64 [draft vocabulary].
            None if the ids are equal.
    """

    def __init__(self, spec: HeadsSpec, dtype: Dtype, device: Device, matrix: Allocate) -> None:
        self.spec, self.dtype, self._device = spec, dtype, device
        self._table = table_of(spec)
        self._slots = slots(self._table)
        self.params = allocate(self._table, dtype, device, matrix)
        self.targets: Tensor | None = None

    def load(self, folder: Path) -> None:
        """Read all parameters from a folder. Raise `ConfigError` or `ModelLoadError`."""
        host = self._device is HOST
        self.write(self.checked(read_tensors(folder, HOST) if host else read_tensors(folder)))

    def replacing(self, weights: Iterable[tuple[str, Tensor]]) -> Callable[[], None]:
        """Check some parameters as `checked` does, and return the function that writes them."""
        return partial(self.write, self.checked(weights))

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> NewHeads:
        """Check some parameters, given by any of their public names, and return them for `write`.

        Raise `ConfigError` for a tensor that does not belong to the heads.
        """
        params: dict[str, Tensor] = {}
        for public, tensor in weights:
            name = name_in(self.spec, public)
            if name in _UNREAD:
                continue
            expected = self._expected(name)
            if expected is None or tuple(tensor.shape) != expected:
                reason = "is unknown" if expected is None else f"must have shape {expected}"
                raise ConfigError(
                    f"draft heads: tensor {public!r} of shape {tuple(tensor.shape)} {reason}."
                )
            if name != "map" and dtype_name(tensor.dtype) not in WEIGHT_DTYPES:
                raise ConfigError(
                    f"draft heads: tensor {public!r} has dtype {dtype_name(tensor.dtype)}; "
                    "quantized heads are not supported."
                )
            params[name] = of_kind(self.dtype, tensor)
        targets = self._mapped(params.pop("map")) if "map" in params else self.targets
        return NewHeads(params, targets)

    def write(self, new: NewHeads) -> None:
        """Overwrite these parameters in place."""
        for name, tensor in new.params.items():
            write(self.params, self._slots[name], tensor.to(self.dtype))
        self.targets = new.targets

    def _expected(self, name: str) -> tuple[int, ...] | None:
        if name == "map":
            return (self.spec.draft_vocab_size,)
        return self._slots[name].shape if name in self._slots else None

    def _mapped(self, stored: Tensor) -> Tensor | None:
        """Return the policy's ids, or None if they equal the heads' ids."""
        ids = mapped_ids(self.spec, stored)
        xp = namespace(ids)
        if xp.equal(ids, xp.arange(vocab_of(self.spec))):
            return None
        return ids if self._device is HOST else ids.to(self._device)


def vocab_of(spec: HeadsSpec) -> int:
    """Return the vocabulary size of the policy."""
    return spec.vocab_size if isinstance(spec, MedusaSpec) else spec.layer.vocab_size


def mapped_ids(spec: HeadsSpec, stored: Tensor) -> Tensor:
    """Convert a stored vocabulary map to the policy's ids, int64.

    EAGLE-3 stores the offset of each id from its index. Raise `ConfigError` for an id outside the
    policy's vocabulary.
    """
    ids = stored.long()
    if isinstance(spec, EagleSpec):
        ids = ids + namespace(ids).arange(len(ids))
    wrong = ids[(ids < 0) | (ids >= vocab_of(spec))]
    if len(wrong):
        raise ConfigError(
            f"draft heads: the vocabulary map has token {int(wrong[0])}, but the policy has "
            f"only {vocab_of(spec)} tokens."
        )
    return ids


def read_named(folder: Path, spec: HeadsSpec) -> dict[str, Tensor]:
    """Return the tensors in a folder that `read_heads` accepted, by canonical name.

    A vocabulary map is returned as stored.
    """
    named = ((name_in(spec, public), tensor) for public, tensor in read_tensors(folder))
    return {name: tensor for name, tensor in named if name not in _UNREAD}


def heads_bytes(spec: HeadsSpec, dtype: Dtype) -> int:
    """Return the size of the parameters in bytes."""
    return num_bytes(table_of(spec), dtype)


def _medusa(
    folder: Path, config: Mapping[str, Any], shapes: Shapes, policy: ModelSpec
) -> MedusaSpec:
    hidden, vocab = policy.hidden_size, policy.vocab_size
    _require_same(folder, "hidden_size", config.get("hidden_size"), hidden)
    _require_same(folder, "vocab_size", config.get("vocab_size"), vocab)
    num_heads = _count(folder, config, ("num_heads", "medusa_num_heads"))
    num_blocks = _count(folder, config, ("num_hidden_layers", "num_layers", "medusa_num_layers"))
    shared = bool(config.get("original_lm_head", False))
    truncated = config.get("truncated_vocab_size")
    return MedusaSpec(
        num_heads=num_heads,
        num_blocks=num_blocks,
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab if truncated is None else int(truncated),
        biases="blocks.0.layers.0.bias" in shapes,
        projections=int("lm_heads.0.weight" in shapes) if shared else num_heads,
    )


def _eagle(folder: Path, config: Mapping[str, Any], shapes: Shapes, policy: ModelSpec) -> EagleSpec:
    layer_config = config.get("transformer_layer_config")
    nested = config.get("eagle_config") or {}
    if layer_config is None:
        fields = {"num_hidden_layers": 1, **config}
        fields["architectures"] = ["LlamaForCausalLM"]
    else:
        name, defaults = _layer_kind(folder, layer_config)
        fields = {**defaults, **layer_config, "architectures": [name]}
    for option in ("parallel_drafting", "p_eagle"):
        if config.get(option):
            raise ConfigError(f"draft_model: {folder}: {option} is not supported.")
    if nested.get("use_aux_hidden_state") is False:
        raise ConfigError(
            f"draft_model: {folder}: use_aux_hidden_state=false is not supported; use heads that "
            "read three layers."
        )
    fields = {key: value for key, value in fields.items() if key != "quantization_config"}
    try:
        layer = spec_from_config(fields)
    except ModelLoadError as problem:
        raise ConfigError(f"draft_model: {folder}: {problem}") from problem
    if layer.num_layers != 1:
        raise ConfigError(
            f"draft_model: {folder} has num_hidden_layers={layer.num_layers}; only EAGLE-3 heads "
            "with one layer are supported."
        )
    _require_same(folder, "vocab_size", layer.vocab_size, policy.vocab_size)
    target = int(config.get("target_hidden_size") or layer.hidden_size)
    _require_same(folder, "target_hidden_size", target, policy.hidden_size)
    has_embedding = "embed_tokens.weight" in shapes
    if not has_embedding:
        _require_same(folder, "hidden_size", layer.hidden_size, policy.hidden_size)
    return EagleSpec(
        layer=layer,
        target_hidden_size=target,
        layer_ids=_layer_ids(folder, config, policy),
        draft_vocab_size=int(config.get("draft_vocab_size") or layer.vocab_size),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        has_embedding=has_embedding,
    )


def _layer_kind(folder: Path, layer_config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    kind = layer_config.get("model_type", "qwen3")
    if kind not in _LAYERS:
        raise ConfigError(
            f"draft_model: {folder}: model_type={kind!r} of the layer must be one of "
            f"{', '.join(map(repr, _LAYERS))}."
        )
    return _LAYERS[kind]


def _layer_ids(folder: Path, config: Mapping[str, Any], policy: ModelSpec) -> tuple[int, ...]:
    """Return the layers of the policy before which the residual stream is read.

    vLLM and speculators use this numbering. SGLang's `eagle_config` names the layers after which it
    is read.
    """
    count = policy.num_layers
    named = config.get("eagle_aux_hidden_state_layer_ids")
    if not named:
        nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()
        named = [each + 1 for each in nested]
    ids = tuple(map(int, named)) if named else (2, count // 2, count - 3)
    wrong = [each for each in ids if not 0 <= each < count]
    if wrong or len(ids) != 3:
        raise ConfigError(
            f"draft_model: {folder} reads layers {ids}, but the policy has {count} layers; "
            "eagle_aux_hidden_state_layer_ids must name three of them."
        )
    return ids


def _require_same(folder: Path, name: str, value: Any, wanted: int) -> None:
    if value is not None and int(value) != wanted:
        raise ConfigError(
            f"draft_model: {folder} has {name}={value}, but the policy has {wanted}; use heads "
            "trained for this policy."
        )


def _count(folder: Path, config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    count = next((config[name] for name in names if config.get(name) is not None), 1)
    if not 0 < int(count) <= 64:
        raise ConfigError(f"draft_model: {folder} has {names[0]}={count}; it must be 1 to 64.")
    return int(count)


def _require_shape(folder: Path, name: str, shapes: Shapes, expected: tuple[int, ...]) -> None:
    label = {"map": "d2t or token_map (the vocabulary map)"}.get(name, repr(name))
    if name not in shapes:
        raise ConfigError(f"draft_model: {folder}: tensor {label} is missing.")
    if shapes[name] != expected:
        raise ConfigError(
            f"draft_model: {folder}: tensor {label} has shape {shapes[name]}, expected {expected}."
        )


def _one(name: str, source: str, *shape: int) -> ParamSpec:
    return ParamSpec(name, shape, (Source(source, shape),))


def _stack(name: str, sources: Mapping[str, int], *inner: int) -> ParamSpec:
    parts = tuple(Source(source, (rows, *inner)) for source, rows in sources.items())
    return ParamSpec(name, (sum(sources.values()), *inner), parts)


def _medusa_table(spec: MedusaSpec) -> tuple[ParamSpec, ...]:
    hidden = spec.hidden_size
    table: list[ParamSpec] = []
    for head in range(spec.num_heads):
        for block in range(spec.num_blocks):
            name = f"blocks.{head}.layers.{block}"
            table.append(_one(f"{name}.weight", f"{name}.weight", hidden, hidden))
            if spec.biases:
                table.append(_one(f"{name}.bias", f"{name}.bias", hidden))
    names = [f"lm_heads.{head}.weight" for head in range(spec.projections)]
    table += [_one(name, name, spec.draft_vocab_size, hidden) for name in names]
    return tuple(table)


def _eagle_table(spec: EagleSpec) -> tuple[ParamSpec, ...]:
    layer = spec.layer
    hidden, inner, target = layer.hidden_size, layer.intermediate_size, spec.target_hidden_size
    q_rows, kv_rows = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    table = [
        _one("fc", "fc.weight", hidden, 3 * target),
        _one("embed_norm", "layers.0.input_layernorm.weight", hidden),
        _one("hidden_norm", "layers.0.hidden_norm.weight", hidden),
        _stack("qkv", {f"{attention}.{k}.weight": n for k, n in rows.items()}, 2 * hidden),
        _one("o", f"{attention}.o_proj.weight", hidden, q_rows),
        _one("mlp_norm", "layers.0.post_attention_layernorm.weight", hidden),
        _stack("gate_up", {f"{mlp}.{k}_proj.weight": inner for k in ("gate", "up")}, hidden),
        _one("down", f"{mlp}.down_proj.weight", hidden, inner),
        _one("norm", "norm.weight", hidden),
        _one("head", "lm_head.weight", spec.draft_vocab_size, hidden),
    ]
    if layer.qkv_bias:
        table.append(_stack("qkv_bias", {f"{attention}.{k}.bias": n for k, n in rows.items()}))
    if layer.o_bias:
        table.append(_one("o_bias", f"{attention}.o_proj.bias", hidden))
    if layer.qk_norm:
        table += [
            _one(f"{which}_norm", f"{attention}.{which}_norm.weight", layer.head_dim)
            for which in "qk"
        ]
    if spec.norm_before_fc:
        table.append(_one("input_norm", "input_norm.weight", 3 * target))
    if spec.fc_norm:
        table += [_one(f"fc_norm.{i}", f"fc_norm.{i}.weight", target) for i in range(3)]
    if spec.has_embedding:
        table.append(_one("embed", "embed_tokens.weight", layer.vocab_size, hidden))
    return tuple(table)
