"""`MtpSpec`: the layer of a checkpoint that predicts the token after the next one.

The layer (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2) reads the embedding
of a token and the hidden state of the position before it. It norms both, joins them by a product,
and passes the result through a decoder layer of its own, a norm and the model's head.
"""

from dataclasses import dataclass

PARAMS = "mtp."  # prefix of its parameters in the decoder


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """Names and inputs of the layer. In a family's row, `{last}` stands for the number of layers.

    Attributes:
        prefix: Prefix of its tensors in the checkpoint.
        layer: Name of its decoder layer.
        embed_norm, hidden_norm: Names of the norms of the embedding and of the hidden state.
        project: Name of the matrix that joins both, [H, 2 * H].
        norm: Name of the norm before the head.
        hidden_first: The first columns of the matrix belong to the hidden state, not to the
            embedding.
        reads_stream: The hidden state is the residual stream after the model's last layer, not the
            output of the model's last norm.
        feeds_stream: A second prediction continues from the layer's residual stream, not from the
            output of its last norm.
        unread: Prefixes of tensors that equal the model's embedding and head.
    """

    prefix: str
    layer: str
    embed_norm: str
    hidden_norm: str
    project: str
    norm: str
    hidden_first: bool = False
    reads_stream: bool = False
    feeds_stream: bool = False
    unread: tuple[str, ...] = ()


# Qwen3-Next and Qwen3.5
QWEN = MtpSpec(
    prefix="mtp.",
    layer="mtp.layers.0",
    embed_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    project="mtp.fc.weight",
    norm="mtp.norm.weight",
)
# DeepSeek-V3, GLM-4.5 and GLM-4.7-Flash: one layer more than `num_hidden_layers`
DEEPSEEK = MtpSpec(
    prefix="model.layers.{last}.",
    layer="model.layers.{last}",
    embed_norm="model.layers.{last}.enorm.weight",
    hidden_norm="model.layers.{last}.hnorm.weight",
    project="model.layers.{last}.eh_proj.weight",
    norm="model.layers.{last}.shared_head.norm.weight",
    feeds_stream=True,
    unread=("model.layers.{last}.embed_tokens.", "model.layers.{last}.shared_head.head."),
)
MIMO = MtpSpec(
    prefix="model.mtp_layers.",
    layer="model.mtp_layers.0",
    embed_norm="model.mtp_layers.0.token_layernorm.weight",
    hidden_norm="model.mtp_layers.0.hidden_layernorm.weight",
    project="model.mtp_layers.0.input_proj.weight",
    norm="model.mtp_layers.0.final_layernorm.weight",
    hidden_first=True,
    reads_stream=True,
)
