"""Every family on the CUDA backend in Triton's interpreter, against the float32 reference."""

from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from tests.device.test_triton_states import LAYERS as STATE_LAYERS
from tests.invariance.scenario import small_tiles
from tests.models.tiny import FAMILIES, tiny_model
from tests.parity.compare import TOLERANCE

pytest.importorskip("triton")

# Windows (17 to 33 tokens) are shorter than the second prompt.
PROMPTS = [[5, 9], [(11 * i) % 290 + 3 for i in range(34)]]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 300}
# unique features: norms of three kinds, GELU, windows, factors
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
# sizes of families with layers of several kinds, latents or states, and of other families in their
# tests
SPECIAL: dict[str, dict[str, Any]] = {
    "gemma3": LAYERS,
    "gemma4": LAYERS
    | {"num_hidden_layers": 3, "layer_types": [*LAYERS["layer_types"], "full_attention"]}
    | {"num_kv_shared_layers": 1, "head_dim": 16},
    "gemma4-moe": LAYERS | {"head_dim": 16},
    "deepseek-v3": {"num_hidden_layers": 2, "num_attention_heads": 4},
    "qwen2": {"num_hidden_layers": 2},
    **{name: {"num_hidden_layers": 2} | sizes for name, sizes in STATE_LAYERS.items()},
}
OFTEN = (
    *("qwen3", "gemma3", "olmo2", "granite", "gemma4", "gemma4-moe", "deepseek-v3"),
    *STATE_LAYERS,
)
PARAMS = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=True, ignore_eos=True)


def complete(folder: Path, **options: Any) -> list[TrainingSample]:
    config = EngineConfig(
        model_path=str(folder), dtype="float32", device="cpu", kv_cache_memory=2**20, **options
    )
    with InferenceEngine(config) as engine:
        return engine.generate(PROMPTS, PARAMS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    [
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow)
        for name in dict.fromkeys((*FAMILIES, *SPECIAL))
    ],
)
def test_triton_families_agree_with_the_reference(tmp_path: Path, family: str) -> None:
    kv_heads = 1 if family in ("gemma3", "gemma4", "qwen3") else 2  # grouped query heads, and not
    options = {"num_key_value_heads": kv_heads, "num_hidden_layers": 1} | SPECIAL.get(family, {})
    folder = tiny_model(tmp_path, family, **SIZES | options)
    expected = complete(folder, backend="reference")
    for batch_invariant in (False, True):
        with small_tiles():
            actual = complete(folder, backend="cuda", batch_invariant=batch_invariant)
        for sample, other in zip(actual, expected, strict=True):
            assert sample.completion_tokens == other.completion_tokens
            assert sample.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)
            assert sample.prompt_logprobs is not None
            assert other.prompt_logprobs is not None
            assert sample.prompt_logprobs[1:] == pytest.approx(
                other.prompt_logprobs[1:], abs=TOLERANCE
            )
