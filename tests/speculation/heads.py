"""Random heads that draft, and folders of them as others write them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nano_inference import InferenceEngine
from nano_inference.engine.medusa import MedusaDrafts
from nano_inference.models.draft_heads import HeadsSpec, HeadWeights, MedusaSpec, table_of
from nano_inference.scheduling.sequence import POLICY
from nano_inference.speculation.drafter import Drafter
from nano_inference.speculation.grammar import ForcedDrafts
from nano_inference.speculation.suffix import SuffixDrafts


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers of trained size; norm weights stand around 1."""
    found = torch.randn(shape, generator=generator) * 0.2
    return found + 1.0 if len(shape) == 1 else found


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


def with_heads(engine: InferenceEngine, weights: HeadWeights, most: int) -> Drafter:
    """A drafter whose model is these heads."""
    source = MedusaDrafts(engine.runner.models[POLICY], weights)
    engine.loop.watch = source.see
    return Drafter([ForcedDrafts(), SuffixDrafts()], most=most, model=source)


def write_heads(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def medusa_of_vllm(
    *, hidden: int = 64, vocab: int = 300, heads: int = 3, known: int | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors as vLLM reads them; `known`: tokens of a vocabulary of their own."""
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
    """config.json and tensors as github.com/FasterDecoding/Medusa writes them."""
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
