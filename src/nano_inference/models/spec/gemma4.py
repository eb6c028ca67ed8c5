"""What a config.json of Gemma 4 means, where it says nothing too."""

from nano_inference.models.spec.config_checks import Config
from nano_inference.models.spec.text_part import text_config

# What transformers takes for said.
_USUAL: Config = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
# Of the classes that read all that they read with the text model.
_UNIFIED: Config = {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_ROPES: Config = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def gemma4_config(config: Config) -> Config:
    """With what it leaves out; the last layer sees everything, whatever is said of it."""
    unified = any("Unified" in name for name in config["architectures"])
    usual = {**_USUAL, **(_UNIFIED if unified else {})}
    told = {name: value for name, value in config.items() if value is not None}
    read = {**usual, "rope_parameters": _ROPES, **told}
    if types := read.get("layer_types"):
        read["layer_types"] = [*types[:-1], "full_attention"]
    else:
        last = read["num_hidden_layers"] - 1
        read["layer_types"] = [
            "sliding_attention" if (layer + 1) % 6 and layer < last else "full_attention"
            for layer in range(last + 1)
        ]
    if read.get("use_bidirectional_attention") == "vision":  # of pictures, and text sees the past
        del read["use_bidirectional_attention"]
    return read


def gemma4_text_config(config: Config) -> Config:
    """The same, of the text part of a class that also reads pictures or sounds."""
    return gemma4_config(text_config(config))
