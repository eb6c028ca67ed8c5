"""The text part of classes that also read pictures or sounds: `…ForConditionalGeneration`.

Their config.json holds the text model's under `text_config`, or beside the rest. Their checkpoints
call the same tensor by one of several names, as transformers changed its mind; what belongs to the
other parts is passed over.
"""

from nano_inference.models.spec.config_checks import Config, check_values

# Instead of `model.` before the names of the text model's tensors.
_MODELS = ("model.language_model.", "language_model.model.")
_HEADS = ("language_model.lm_head.",)  # instead of `lm_head.`
# How names of the other parts' tensors begin, with or without `model.`.
_OTHERS = (
    *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "embed_vision."),
    *("audio_tower.", "embed_audio.", "vision_embedder."),
)

# What transformers takes a `text_config` of Gemma 3 to say where it says nothing; published ones
# rely on it.
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
    """The text model's values, and those beside them; the class itself says whether the head is the
    embedding, if it says anything. Raises `ModelLoadError`.
    """
    inner = config.get("text_config") or {}
    check_values(inner, "config.json: text_config")
    told = {name: value for name, value in inner.items() if value is not None}
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return {**config, **told, **tied, "architectures": config["architectures"]}


def gemma3_text_config(config: Config) -> Config:
    """The same, of Gemma 3."""
    inner = config.get("text_config") or {}
    bases = {} if "rope_parameters" in inner else _GEMMA3_BASES
    return {**GEMMA3_TEXT, **bases, **text_config(config)}


def other_names(name: str) -> tuple[str, ...]:
    """What checkpoints, and transformers in memory, may call a tensor of the text model."""
    if name.startswith("model."):
        return tuple(prefix + name.removeprefix("model.") for prefix in _MODELS)
    return tuple(prefix + name.removeprefix("lm_head.") for prefix in _HEADS)


def is_of_another_part(name: str) -> bool:
    """Whether a tensor belongs to what reads pictures or sounds."""
    return name.removeprefix("model.").startswith(_OTHERS)
