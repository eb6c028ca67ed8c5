"""Part `rl`: the engine operations of a training loop in addition to tokens, in seconds and peak
memory.

Measured are an update of all weights from tensors on the same card, sleep and wake with addresses
kept, and one step of a `PolicyModel`: forward, backward, publish.
"""

import gc
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gpu import card, ours
from benchmarks.gpu.report import Part
from nano_inference import InferenceEngine, SamplingParams

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Run

PROMPTS = 16
TOKENS = 128


class Timer:
    """Measures seconds and peak memory of consecutive operations."""

    def __init__(self, part: Part, device: str) -> None:
        self._part, self._device = part, device

    def __call__(self, name: str, run: Callable[[], Any]) -> Any:
        """Run an operation and add a row. Return its result, or None after recording
        its failure.
        """
        gc.collect()
        card.release(self._device)
        if self._device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        card.wait(self._device)
        began = time.perf_counter()
        try:
            found = run()
            card.wait(self._device)
        except Exception as error:
            self._part.fail(name, f"{type(error).__name__}: {error}", traceback.format_exc())
            return None
        seconds = time.perf_counter() - began
        memory = card.peak_bytes(self._device)
        note = (
            f"peak {memory['allocated'] / 1e9:.2f} GB allocated, {memory['used'] / 1e9:.2f} GB used"
        )
        self._part.add(name, [seconds], "s", note=note)
        return found


def measure_rl(run: "Run") -> None:
    """Measure the engine first, then the trainer on the same card."""
    scale, part = run.scale, Part(run.out, "rl")
    timer, tokens = Timer(part, scale.device), max(2, TOKENS // scale.shrink)
    prompts = [[1 + i, 2, 3] for i in range(min(PROMPTS, scale.requests))]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    memory = {} if scale.device == "cpu" else {"gpu_memory_utilization": 0.5}
    with ours.opened(scale, run.small(), **memory) as engine:
        samples = timer("generate", lambda: engine.generate(prompts, params, progress=False))
        weights = weights_of(run.small(), scale.device)
        timer(
            "update_weights, all, from the card",
            lambda: engine.update_weights(weights, blocking=True),
        )
        weights.clear()
        for kept in (True, False):
            words = "KV cache" if kept else "KV cache and weights"
            timer(f"sleep, {words}", lambda kept=kept: engine.sleep(weights=not kept))
            timer(f"wake, {words}", engine.wake)
            timer(
                f"first step after it, {words}",
                lambda: engine.generate([[1, 2]], SamplingParams(max_tokens=2), progress=False),
            )
        train(timer, engine, samples)


def weights_of(folder: Path, device: str) -> dict[str, Tensor]:
    """Return a model's tensors on the device."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file, device=device)
    return found


def train(timer: Timer, engine: InferenceEngine, samples: Any) -> None:
    """Train a policy for one step on the samples that the engine drew."""
    from nano_inference.rl import PolicyModel

    policy = timer("PolicyModel built", lambda: PolicyModel(engine))
    if policy is None or samples is None:
        return

    def backward() -> None:
        sequences = [[*each.prompt_tokens, *each.completion_tokens] for each in samples]
        logprobs = policy.logprobs(sequences, from_position=len(samples[0].prompt_tokens))
        (-torch.cat(logprobs).mean()).backward()

    timer("forward and backward", backward)
    timer("publish", policy.publish)
    policy.close()
