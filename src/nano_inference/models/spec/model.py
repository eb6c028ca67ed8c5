"""`ModelSpec`: static description of a model for the decoder."""

from dataclasses import dataclass
from typing import Literal

from nano_inference.models.spec.experts import MoeSpec
from nano_inference.models.spec.latents import LatentSpec
from nano_inference.models.spec.layers import LayerSpec
from nano_inference.models.spec.mtp import MtpSpec
from nano_inference.models.spec.quantisation import Quantisation
from nano_inference.models.spec.rope import RopeSpec
from nano_inference.models.spec.states import StateSpec
from nano_inference.sampling.logit_scale import LogitScale

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "xielu", "relu2"]
NormPlacement = Literal["pre", "post", "both"]
QkNorm = Literal["head", "full"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Static description of a model: everything the decoder needs except weights.

    Attributes:
        architecture: Class name in config.json.
        rms_norm_eps: Constant added to the mean square before the root.
        tie_word_embeddings: The head is the embedding.
        max_position: Context length that the model was trained for.
        eos_token_ids: Token ids that end a sample.
        checkpoint_dtype: Name of the dtype that the checkpoint declares.
        quantisation: Storage of the weights that the checkpoint declares. None: unquantized.
        quantized_source: The checkpoint was made from a quantized file, so its dtype is arbitrary.
        windows: Number of tokens that a token attends to, itself included, for each layer. 0: no
            limit.
        ropes: Rotary embedding of each layer.
        qkv_bias, o_bias: The attention's projections have biases.
        qk_norm: Normalization of queries and keys before rotation: of each head (`"head"`) or of
            all heads of a token together (`"full"`).
        norms: Position of a layer's norms: before attention and MLP (`"pre"`), after them
            (`"post"`), or `"both"`.
        norm_offset: Constant added to the weights of norms, which are then kept in float32.
        activation: Activation of the MLP's gate, `"silu"`, `"gelu_tanh"` or `"clamped_swiglu"`, or
            of an MLP without a gate, `"xielu"` or `"relu2"`.
        bare_norms: Norms have no weights.
        embed_norm: Embeddings are normalized too, with the weights of the last norm.
        attention_scale: Factor of the products of queries and keys.
        attention_cap, logits_cap: Soft cap: a score or logit s becomes cap * tanh(s / cap). 0: no
            cap.
        gated_attention: The attention output is multiplied by the sigmoid of a projection.
        attention_sinks: Each query head adds one learned score, without a key, to its softmax.
        embed_scale, residual_scale: Factors of embeddings, and of a block's output before it is
            added to the residual stream.
        logits_divisor: Divisor of logits.
        fused_qkv, fused_gate_up: The checkpoint stores q, k and v, or gate and up, in one tensor.
        moe: Layers of experts. None: no such layers.
        state: Layers that carry a state instead of attending to keys. None: no such layers.
        renamed: Replacements in checkpoint names: (usual part, this model's part).
        is_text_part: The checkpoint also holds image or audio parts, which are ignored.
        latent: Attention over latents, to which `num_kv_heads` and `head_dim` then refer. None:
            attention over keys and values.
        unused: Prefixes of checkpoint tensors that are not used.
        kinds: One entry for each layer if layers differ. `num_kv_heads`, `head_dim` and
            `intermediate_size` then describe most layers. Empty: all layers are alike (`layer`).
        value_norm: Values are normalized too, head by head and without weights.
        layer_inputs: Width of the additional input of each layer, made from the token and its
            embedding. 0: no such inputs.
        layer_vocab: Number of tokens that have such inputs.
        layer_scales: The output of each layer is multiplied by a number from the checkpoint.
        mtp: Multi-token prediction layer, if it is loaded too. None: it is ignored.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    ropes: tuple[RopeSpec, ...]
    windows: tuple[int, ...]
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    attention_scale: float
    gated_attention: bool = False
    attention_sinks: bool = False
    quantisation: Quantisation | None = None
    quantized_source: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm | None = None
    norms: NormPlacement = "pre"
    norm_offset: float = 0.0
    activation: Activation = "silu"
    bare_norms: bool = False
    embed_norm: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    attention_cap: float = 0.0
    logits_cap: float = 0.0
    fused_qkv: bool = False
    fused_gate_up: bool = False
    moe: MoeSpec | None = None
    state: StateSpec | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    is_text_part: bool = False
    latent: LatentSpec | None = None
    unused: tuple[str, ...] = ()
    kinds: tuple[LayerSpec, ...] = ()
    value_norm: bool = False
    layer_inputs: int = 0
    layer_vocab: int = 0
    layer_scales: bool = False
    mtp: MtpSpec | None = None

    def layer(self, layer: int) -> LayerSpec:
        """Return the sizes of one layer."""
        if self.kinds:
            return self.kinds[layer]
        heads = self.num_kv_heads, self.head_dim
        return LayerSpec(*heads, False, layer, self.intermediate_size)

    def ignores(self, name: str) -> bool:
        """Return True if a checkpoint tensor of this name is not used."""
        if self.mtp is not None and name.startswith(self.mtp.prefix):
            return name.startswith(self.mtp.unread)
        return name.startswith(self.unused)

    @property
    def gated(self) -> bool:
        """True if MLPs have a gate."""
        return self.activation not in ("xielu", "relu2")

    @property
    def logit_scale(self) -> LogitScale:
        """Scaling of the head's products into logits."""
        return LogitScale(self.logits_divisor, self.logits_cap)

    @property
    def value_dim(self) -> int:
        """Width of a head's output."""
        return self.head_dim if self.latent is None else self.latent.sizes.value

    @property
    def kv_tensors(self) -> int:
        """Tensors in the KV cache: keys and values (2), or latents, which serve as both (1)."""
        return 2 if self.latent is None else 1
