"""Every family on the card, compared with logits of the same weights from the float32 reference
backend on a CPU.

In float32 the tolerance is 1e-4 on every logprob of the whole vocabulary, because only the order of
additions differs. In bfloat16 it is twice the largest rounding error of the reference backend,
which rounds in the same places. If that error is nearly zero, the tolerance is half of the
bfloat16 spacing near 1.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, model_forward
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.ops.batches import Rows, batch_of_rows
from tests.gpu.target import Target, moved
from tests.models.tiny import FAMILIES as WITHOUT_STATES
from tests.models.tiny import tiny_model
from tests.parity.compare import TOLERANCE

pytestmark = pytest.mark.gpu

FAMILIES = (*WITHOUT_STATES, "lfm2", "qwen3_5")
BLOCK = 16
IN_A_DRY_RUN = ("llama", "gemma3", "qwen3", "lfm2", "qwen3_5")
SLACK = 2.0**-8  # half of the spacing of bfloat16 numbers near 1
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def folder_of(tmp_path: Path, family: str, target: Target, dtype: str) -> Path:
    """Return a tiny model, or a smaller one in a dry run. For bfloat16 the checkpoint is rounded,
    so all backends have the same weights.
    """
    small = SIZES if target.dry else {}
    return tiny_model(tmp_path, family, torch_dtype=dtype, **small)


def prompts(target: Target) -> list[list[int]]:
    """Return a short prompt, one longer than all windows, and one longer than several key tiles."""
    lengths = (5, 40) if target.dry else (1, 5, 40, 150, 400)
    return [[(7 * i + length) % 290 + 3 for i in range(length)] for length in lengths]


@torch.inference_mode()
def logprobs(config: EngineConfig, texts: list[list[int]]) -> Tensor:
    """Return the logprobs of the whole vocabulary after every token, all texts in one batch: [N, V]
    on the CPU.
    """
    with InferenceEngine(config) as engine:
        chunks: list[Rows] = []
        first = 0
        for text in texts:
            last = first + -(-len(text) // BLOCK)
            chunks.append(Rows(text, 0, range(first, last)))
            first = last
        storage = KVStorage(engine.spec, first, BLOCK, engine.model.dtype, engine.model.device)
        for tensor in storage.tensors:  # unwritten slots must not be read
            tensor.fill_(torch.nan)
        batch = batch_of_rows(chunks, BLOCK, draws=range(sum(len(text) for text in texts)))
        logits = model_forward(engine.model, moved(batch, config.device), storage)
        return logits.log_softmax(dim=-1).cpu()


# heads of two sizes, experts next to an MLP, and latents
MODELS = (*FAMILIES, "gemma4", "gemma4-moe", "deepseek-v3")


def reference(folder: Path, dtype: str) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder),
        dtype=dtype,
        device="cpu",
        backend="reference",
        kv_cache_memory=1 << 20,
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_float32_agrees_with_the_cpu(
    tmp_path: Path, target: Target, family: str, batch_invariant: bool
) -> None:
    if target.dry and (family not in IN_A_DRY_RUN or not batch_invariant):
        pytest.skip("a dry run has one family of each kind")
    folder = folder_of(tmp_path, family, target, "float32")
    expected = logprobs(reference(folder, "float32"), prompts(target))
    got = logprobs(target.config(folder, batch_invariant=batch_invariant), prompts(target))
    assert (got - expected).abs().max() <= TOLERANCE


@pytest.mark.gpu(card=True)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_bfloat16_error_is_within_its_rounding(
    tmp_path: Path, target: Target, family: str, batch_invariant: bool
) -> None:
    folder, texts = folder_of(tmp_path, family, target, "bfloat16"), prompts(target)
    exact = logprobs(reference(folder, "float32"), texts)
    rounding = (logprobs(reference(folder, "bfloat16"), texts) - exact).abs()
    error = (
        logprobs(target.config(folder, "bfloat16", batch_invariant=batch_invariant), texts) - exact
    ).abs()
    assert error.max() <= 2 * rounding.max() + SLACK
    assert error.mean() <= 1.5 * rounding.mean() + SLACK / 16


@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_equal_the_cpu_within_the_margin(
    tmp_path: Path, target: Target, family: str
) -> None:
    """A completion may differ from the CPU's only if two tokens are closer than the tolerance."""
    if target.dry and family not in IN_A_DRY_RUN:
        pytest.skip("a dry run has one family of each kind")
    folder, texts = folder_of(tmp_path, family, target, "float32"), prompts(target)
    params = SamplingParams(
        temperature=0, max_tokens=target.size(40, 3), top_logprobs=2, ignore_eos=True
    )
    with InferenceEngine(reference(folder, "float32")) as engine:
        expected = engine.generate(texts, params)
    with InferenceEngine(target.config(folder, batch_invariant=False)) as engine:
        samples = engine.generate(texts, params)
    for sample, other in zip(samples, expected, strict=True):
        pairs = list(zip(sample.completion_tokens, other.completion_tokens, strict=True))
        parted = next((i for i, (one, two) in enumerate(pairs) if one != two), len(pairs))
        assert sample.logprobs[:parted] == pytest.approx(other.logprobs[:parted], abs=TOLERANCE)
        if parted < len(pairs):
            assert other.top_logprobs is not None
            (_, (first, second)) = other.top_logprobs[parted]
            assert first - second <= 2 * TOLERANCE, f"another token at {parted} beyond tolerance"
