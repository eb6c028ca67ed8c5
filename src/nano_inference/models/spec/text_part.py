"""The text part of classes that also read images or audio: `…ForConditionalGeneration`.

Their config.json holds the text model's values under `text_config` or at the top level. Their
checkpoints use one of several names for the same tensor, because transformers renamed it over time.
Tensors of the other parts are ignored.
"""

from nano_inference.models.spec.config_checks import Config, check_values

# Replacements of `model.` in the names of the text model's tensors.
_MODELS = ("model.language_model.", "language_model.model.")
_HEADS = ("language_model.lm_head.",)  # replacement of `lm_head.`
# Prefixes of tensor names of the other parts, with or without `model.`.
_OTHERS = (
    *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "embed_vision."),
    *("audio_tower.", "embed_audio.", "vision_embedder."),
)

# Defaults of transformers for a `text_config` of Gemma 3. Published models rely on them.
GEMMA3_TEXT: Config = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
_GEMMA3_BASES: Config = {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}


def text_config(config: Config) -> Config:
    """Merge the text model's values into the top-level ones.

    `tie_word_embeddings` at the top level wins over `text_config`. Raises `ModelLoadError`.
    """
    inner = config.get("text_config") or {}
    check_values(inner, "config.json: text_config")
    values = {name: value for name, value in inner.items() if value is not None}
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return {**config, **values, **tied, "architectures": config["architectures"]}


def gemma3_text_config(config: Config) -> Config:
    """Merge as `text_config` does, with the defaults of Gemma 3."""
    inner = config.get("text_config") or {}
    bases = {} if "rope_parameters" in inner else _GEMMA3_BASES
    return {**GEMMA3_TEXT, **bases, **text_config(config)}


def other_names(name: str) -> tuple[str, ...]:
    """Return other names of a text tensor, in checkpoints and in transformers' memory."""
    if name.startswith("model."):
        return tuple(prefix + name.removeprefix("model.") for prefix in _MODELS)
    return tuple(prefix + name.removeprefix("lm_head.") for prefix in _HEADS)


def is_of_another_part(name: str) -> bool:
    """Return True if a tensor belongs to the image or audio part."""
    return name.removeprefix("model.").startswith(_OTHERS)
