"""`ModelSpec`: the facts about a model that the decoder needs."""

from dataclasses import dataclass
from typing import Literal

from nano_inference.models.spec.experts import MoeSpec
from nano_inference.models.spec.latents import LatentSpec
from nano_inference.models.spec.layers import LayerSpec
from nano_inference.models.spec.quantisation import Quantisation
from nano_inference.models.spec.rope import RopeSpec
from nano_inference.models.spec.states import StateSpec
from nano_inference.sampling.logit_scale import LogitScale

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "xielu", "relu2"]
NormPlacement = Literal["pre", "post", "both"]
QkNorm = Literal["head", "full"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that the decoder must know of a model; no tensors.

    Attributes:
        architecture: the class name in config.json.
        rms_norm_eps: added to the mean square before its root.
        tie_word_embeddings: the head is the embedding.
        max_position: tokens that the model was made for.
        eos_token_ids: ids that end a sample.
        checkpoint_dtype: name of the dtype that the checkpoint says it has.
        quantisation: how the checkpoint says that its weights are stored; None: as they are.
        quantized_source: the checkpoint was made from a quantised file, so its dtype says nothing.
        windows: one entry a layer: how many tokens, itself included, a token attends to; 0: all
            before it.
        ropes: one entry a layer: its rotary embedding.
        qkv_bias, o_bias: the attention's projections have biases.
        qk_norm: queries and keys are normalised before they are rotated: each head for itself
            (`"head"`), or all heads of a token together (`"full"`).
        norms: where a layer has its norms: before attention and MLP (`"pre"`), after them
            (`"post"`), or `"both"`.
        norm_offset: added to the weights of norms; such weights are kept in float32.
        activation: of the MLP's gate, `"silu"`, `"gelu_tanh"` or `"clamped_swiglu"`; or of an MLP
            without a gate, `"xielu"` or `"relu2"`.
        bare_norms: norms have no weights.
        embed_norm: embeddings are normalised, by the last norm.
        attention_scale: multiplies queries times keys.
        attention_cap, logits_cap: such a score, or a logit, s becomes cap * tanh(s / cap); 0: it
            stays.
        gated_attention: what attention gives is multiplied by the sigmoid of a projection.
        attention_sinks: each query head has a score that belongs to no key, in the softmax's sum.
        embed_scale, residual_scale, logits_divisor: embeddings are multiplied, what a block adds to
            the residual stream is multiplied, logits are divided by it.
        fused_qkv, fused_gate_up: the checkpoint stores q, k, v in one tensor, gate and up in one.
        moe: its layers of experts; None: it has none.
        state: its layers that carry a state instead of attending to keys; None: it has none.
        renamed: parts of names in the checkpoint: ours, and what stands there instead.
        is_text_part: the checkpoint also holds what reads pictures or sounds; it is passed over.
        latent: its attention is over latents, and `num_kv_heads` and `head_dim` are those of these;
            None: over keys and values.
        unused: what names of checkpoint tensors begin with that are not used.
        kinds: one entry a layer, where layers are of several kinds, and `num_kv_heads`, `head_dim`
            and `intermediate_size` are those of most; none: all are as these say (`layer`).
        value_norm: values are normalised by head too, without weights.
        layer_inputs: numbers of an input of its own that each layer gets, made of the token and of
            its embedding; 0: there are none.
        layer_vocab: tokens that such inputs are known of.
        layer_scales: what leaves a layer is multiplied by a number of the layer.
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

    def layer(self, layer: int) -> LayerSpec:
        """What a layer has for itself."""
        if self.kinds:
            return self.kinds[layer]
        heads = self.num_kv_heads, self.head_dim
        return LayerSpec(*heads, False, layer, self.intermediate_size)

    @property
    def gated(self) -> bool:
        """Whether MLPs have a gate."""
        return self.activation not in ("xielu", "relu2")

    @property
    def logit_scale(self) -> LogitScale:
        """From the head's products to logits."""
        return LogitScale(self.logits_divisor, self.logits_cap)

    @property
    def value_dim(self) -> int:
        """Numbers of a head's output."""
        return self.head_dim if self.latent is None else self.latent.sizes.value

    @property
    def kv_tensors(self) -> int:
        """Keys and values; of latents, which are both, one."""
        return 2 if self.latent is None else 1
