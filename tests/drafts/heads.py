"""Random draft heads, and checkpoint folders in the formats of other projects."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nano_inference import InferenceEngine
from nano_inference.core.sequence import DRAFT, POLICY
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.drafts.drafter import Drafter
from nano_inference.drafts.eagle import EagleDrafts
from nano_inference.drafts.heads import (
    EagleSpec,
    HeadsSpec,
    HeadWeights,
    MedusaSpec,
    table_of,
)
from nano_inference.drafts.medusa import MedusaDrafts
from nano_inference.drafts.sources import ForcedDrafts
from nano_inference.drafts.suffix import SuffixDrafts
from nano_inference.models.spec.read import spec_from_config
from nano_inference.models.taps import Taps

# shared by all EAGLE-3 heads: see `eagle_tensors`
LAYER = {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
}


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    """Return random tensors of a trained scale; norm weights are around 1."""
    tensor = torch.randn(shape, generator=generator) * 0.2
    return tensor + 1.0 if len(shape) == 1 else tensor


def random_weights(engine: InferenceEngine, spec: HeadsSpec) -> HeadWeights:
    model, generator = engine.runner.models[POLICY], torch.Generator().manual_seed(7)
    weights = HeadWeights(spec, model.dtype, model.device, model.ops.allocate)
    sources = [source for param in table_of(spec) for source in param.sources]
    random = ((each.name, drawn(generator, *each.shape)) for each in sources)
    weights.write(weights.checked(random))
    return weights


def random_medusa(engine: InferenceEngine) -> HeadWeights:
    hidden, vocab = engine.spec.hidden_size, engine.spec.vocab_size
    return random_weights(engine, MedusaSpec(3, 1, hidden, vocab, vocab, True, 1))


def random_eagle(engine: InferenceEngine) -> HeadWeights:
    """Return a head of one layer with the policy's width."""
    config, _ = eagle_of_sglang(
        hidden=engine.spec.hidden_size, vocab=engine.spec.vocab_size, known=80
    )
    layer = spec_from_config({**config, "architectures": ["LlamaForCausalLM"]})
    spec = EagleSpec(layer, engine.spec.hidden_size, (0, 1, 1), engine.spec.vocab_size)
    return random_weights(engine, spec)


def with_heads(engine: InferenceEngine, weights: HeadWeights, most: int) -> Drafter:
    """Return a drafter whose model is these heads."""
    policy = engine.runner.models[POLICY]
    source: MedusaDrafts | EagleDrafts
    if isinstance(weights.spec, EagleSpec):
        count, size = engine.cache.num_blocks, engine.loop.config.block_size
        storage = KVStorage(weights.spec.layer, count + 8, size, policy.dtype, policy.device)
        engine.runner.storages[DRAFT] = storage  # copied blocks are copied here too
        policy.taps = Taps(weights.spec.layer_ids)
        policy.forget_recorded()
        source = EagleDrafts(policy, weights, storage, range(count, count + 8))
    else:
        source = MedusaDrafts(policy, weights)
    engine.loop.watches = (source.see,)
    return Drafter([ForcedDrafts(), SuffixDrafts()], most=most, model=source)


def write_heads(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def medusa_of_vllm(
    *, hidden: int = 64, vocab: int = 300, heads: int = 3, known: int | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors in the format of vLLM. `known`: tokens of a separate draft
    vocabulary.
    """
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_heads": heads,
        "num_hidden_layers": 2,
    }
    g = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        for block in range(2):
            tensors[f"medusa_heads.blocks.{head}.layers.{block}.weight"] = drawn(g, hidden, hidden)
        tensors[f"medusa_heads.lm_heads.{head}.weight"] = drawn(g, known or vocab, hidden)
    if known is not None:
        config["truncated_vocab_size"] = known
        tensors["token_map"] = torch.randperm(vocab, generator=g)[:known].sort().values
    return config, tensors


def medusa_of_its_authors(
    *, hidden: int = 64, vocab: int = 300, heads: int = 2
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors in the format of github.com/FasterDecoding/Medusa."""
    config = {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "medusa_num_heads": heads,
        "medusa_num_layers": 1,
        "transformers_version": "4.31.0",
    }
    g = torch.Generator().manual_seed(4)
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = drawn(g, hidden, hidden)
        tensors[f"{head}.0.linear.bias"] = drawn(g, hidden) - 1.0
        tensors[f"{head}.1.weight"] = drawn(g, vocab, hidden)
    return config, tensors


def eagle_of_sglang(
    *, hidden: int = 64, vocab: int = 300, known: int = 80
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors in the format of SGLang's training and the EAGLE authors."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": known,
        "vocab_size": vocab,
        "hidden_size": hidden,
        **LAYER,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},  # after these layers
    }
    g = torch.Generator().manual_seed(5)
    tensors = eagle_tensors(g, "midlayer", hidden, known)
    ids = torch.randperm(vocab, generator=g)[:known].sort().values
    tensors["d2t"] = ids - torch.arange(known)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return config, tensors


def eagle_of_speculators(
    *, hidden: int = 64, vocab: int = 300
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors in the format of speculators, with every switch on."""
    layer = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        **LAYER,
    }
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": vocab,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3],  # before these layers
        "speculators_config": {"algorithm": "eagle3"},
    }
    g = torch.Generator().manual_seed(6)
    tensors = eagle_tensors(g, "layers.0", hidden, vocab)
    tensors |= {f"fc_norm.{i}.weight": drawn(g, hidden) for i in range(3)}
    tensors["embed_tokens.weight"] = drawn(g, vocab, hidden)
    return config, tensors


def eagle_tensors(g: torch.Generator, layer: str, hidden: int, known: int) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.hidden_norm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (64, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (32, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (32, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, 64),
        f"{layer}.mlp.gate_proj.weight": (96, hidden),
        f"{layer}.mlp.up_proj.weight": (96, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, 96),
        "norm.weight": (hidden,),
        "lm_head.weight": (known, hidden),
    }
    return {name: drawn(g, *shape) for name, shape in shapes.items()}
