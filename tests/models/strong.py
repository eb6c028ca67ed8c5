"""The oracle of every family: tiny models of transformers in which every part matters, and their
distance from this engine.

transformers' own initialisation is weak: norms are all ones, biases are zero and attention is
nearly uniform, so a missing part changes little. `strong_model` gives each tensor values as large
as in trained models. `disagreement` compares every position. It can omit a feature of the model's
spec, to show that a test would notice.

    oracle = strong_model(tmp_path, "Olmo3ForCausalLM", num_hidden_layers=4, sliding_window=16)
    assert disagreement(tmp_path, oracle) < TOLERANCE
    without = partial(replace, ropes=(RopeSpec(),) * 4)
    assert disagreement(tmp_path, oracle, change=without) > NOTICED
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.checkpoints.loading import load_params, load_spec
from nano_inference.config import Backend
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ranks import build, parts

TOLERANCE = 1e-4  # on a logprob, in float32
NOTICED = 1e-3  # smallest change if a feature is omitted
BEST = 20  # most probable tokens compared at each position
LENGTHS = (1, 5, 40, 200)  # prompt lengths: the last two exceed the windows of these tests

# Classes whose code is published with their weights, and the class of transformers that computes
# the same.
SAME_AS = {"MiMoForCausalLM": "Qwen2ForCausalLM"}

# Default config of a tiny model.
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def class_named(name: str) -> Any:
    """Return a class of transformers by its name, or the class that computes the same."""
    import transformers

    return getattr(transformers, SAME_AS.get(name, name))


def strong_model(
    folder: Path,
    class_name: str,
    *,
    seed: int = 0,
    sizes: Mapping[str, float] | None = None,
    **config: Any,
) -> Any:
    """Save a transformers model with strong random float32 weights into `folder`.

    Each matrix scales its input by about 1.5. A vector varies around its initial value: norms
    around 1 (around 0 if the model adds 1), biases around 0.

    Args:
        folder: Receives config.json and model.safetensors, as transformers writes them.
        class_name: Class of transformers, such as `"Olmo3ForCausalLM"`, or of `SAME_AS`.
        seed: Seed of the weights.
        sizes: Standard deviations by a part of a tensor's name, if the rule above does not fit.
            Such a tensor varies around its initial value.
        config: Settings of the class that override or extend `TINY`. If `text_config` (a mapping)
            is among them, `TINY` is merged into it.
    """
    model_class = class_named(class_name)
    if isinstance(config.get("text_config"), Mapping):
        fields = config | {"text_config": TINY | config["text_config"]}
    else:
        fields = TINY | config
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**fields)).float().eval()
    if "attn_logit_softcapping" in fields:  # transformers 5.18: eager only
        model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    filled: set[int] = set()  # fill tied tensors once
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.data_ptr() not in filled:
            filled.add(tensor.data_ptr())
            _fill(name, tensor, generator, sizes or {})
    model.save_pretrained(folder)
    if class_name in SAME_AS:
        rewrite_config(folder, architectures=[class_name])
    return model


def _fill(
    name: str, tensor: Tensor, generator: torch.Generator, sizes: Mapping[str, float]
) -> None:
    drawn = torch.randn(tensor.shape, generator=generator)
    size = next((size for part, size in sizes.items() if part in name), None)
    if size is not None:
        tensor.add_(drawn * size) if tensor.dim() < 2 else tensor.copy_(drawn * size)
    elif tensor.dim() < 2:
        tensor.add_(drawn * 0.3)
    else:
        tensor.copy_(drawn * 1.5 / tensor.shape[-1] ** 0.5)


def rewrite_config(folder: Path, **changes: Any) -> None:
    """Change keys of a model's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(config), encoding="utf-8")


def strong_prompts(
    vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0
) -> list[list[int]]:
    """Return random token ids, one prompt per length. Ids below 3 are special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def disagreement(
    folder: Path,
    oracle: Any,
    *,
    backend: Backend = "cpu",
    lengths: Sequence[int] = LENGTHS,
    max_tokens: int = 12,
    change: Callable[[ModelSpec], ModelSpec] | None = None,
    **options: Any,
) -> float:
    """Return the largest difference of a logprob between this engine and transformers, both in
    float32.

    Every position of each prompt and its completion is compared: the logprob of its token, those of
    the engine's 20 best tokens, and the engine's n-th best with the oracle's n-th best.

    Args:
        folder: Folder saved by `strong_model`.
        oracle: Return value of `strong_model`.
        backend: Backend of the engine.
        lengths: Lengths of the prompts.
        max_tokens: Tokens sampled after each prompt, at temperature 1.
        change: Transforms the spec for the engine's computation. Weights are loaded by the original
            spec, and those without a place in the changed one are dropped.
        options: Options of the engine.
    """
    with _engine(folder, change, backend=backend, **options) as engine:
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=7,
            ignore_eos=True,
            top_logprobs=BEST,
            prompt_logprobs=True,
            prompt_top_logprobs=BEST,
        )
        for prompt in strong_prompts(engine.spec.vocab_size, lengths):
            engine.add_request(prompt, params)
        samples: list[TrainingSample] = []
        while engine.has_pending():
            samples += engine.step()
    assert len(samples) == len(lengths)
    return max(_difference(oracle, sample) for sample in samples)


def own_rounding(oracle: Any, lengths: Sequence[int] = LENGTHS) -> float:
    """Return the largest error of the oracle's float32 logprobs, by a copy of it in float64."""
    exact, largest = copy.deepcopy(oracle).double(), 0.0
    for prompt in strong_prompts(oracle.get_input_embeddings().num_embeddings, lengths):
        token_ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            rounded, true = (
                model(input_ids=token_ids, use_cache=False).logits.double().log_softmax(dim=-1)
                for model in (oracle, exact)
            )
        largest = max(largest, float((rounded - true).abs().max()))
    return largest


def _engine(
    folder: Path, change: Callable[[ModelSpec], ModelSpec] | None, **options: Any
) -> InferenceEngine:
    common = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**25}
    config = EngineConfig(model_path=str(folder), **(common | options))
    if change is None:
        return InferenceEngine(config)
    read = load_spec(folder)
    changed = change(read)
    assert changed != read

    def load(folder: Path, spec: ModelSpec, *rest: Any) -> dict[str, Any]:
        params = load_params(folder, read, *rest[:3])
        kept = {param.name for param in param_table(spec)}
        return {name: param for name, param in params.items() if name in kept}

    def load_packed(
        folder: Path, spec: ModelSpec, dtype: Any, device: Any, packing: Any, *_: Any
    ) -> dict[str, Any]:
        return load(folder, spec, dtype, device, packing.allocate(None))

    with (
        patch.object(build, "load_spec", lambda _: changed),
        patch.object(parts, "load_params", load),
        patch.object(parts, "load_packed", load_packed),
    ):
        return InferenceEngine(config)


def _difference(oracle: Any, sample: TrainingSample) -> float:
    """Return the largest difference in one sample. NaN counts as infinite."""
    token_ids = torch.tensor([[*sample.prompt_tokens, *sample.completion_tokens]])
    with torch.inference_mode():
        logits = oracle(input_ids=token_ids, use_cache=False).logits[0, :-1].double()
    theirs = logits.log_softmax(dim=-1)
    assert sample.prompt_logprobs is not None
    assert sample.top_logprobs is not None
    assert sample.prompt_top_logprobs is not None
    engine_logprobs = torch.tensor(
        [*sample.prompt_logprobs[1:], *sample.logprobs], dtype=torch.float64
    )
    best = [*sample.prompt_top_logprobs[1:], *sample.top_logprobs]
    ids = torch.tensor([each.token_ids for each in best])
    logprobs = torch.tensor([each.logprobs for each in best], dtype=torch.float64)
    differences = (
        engine_logprobs - theirs.gather(1, token_ids[0, 1:, None])[:, 0],
        logprobs - theirs.gather(1, ids),
        logprobs - theirs.topk(BEST).values,
    )
    return max(float(each.abs().nan_to_num(torch.inf).max()) for each in differences)
