"""Steps that compute a prompt next to a steady decode: their trunk is replayed from a graph."""

import random
import time

from benchmarks.gpu import ours
from benchmarks.gpu.card import wait
from benchmarks.gpu.scale import Scale
from nano_inference import InferenceEngine, SamplingParams

BATCH = 8  # sequences that decode
PROMPTS = (50, 500)  # tokens of the prompt; neither is the size of a graph
STEPS = 20


def measure(engine: InferenceEngine, scale: Scale) -> dict[int, list[float]]:
    """Return the seconds of a step by the length of the prompt that it computes."""
    batch = min(BATCH, scale.batches[-1])
    ours.start_decode(engine, batch, scale)
    found: dict[int, list[float]] = {}
    rng, vocab = random.Random(0), scale.small["vocab_size"]
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    for tokens in PROMPTS:
        length = max(2, tokens // scale.shrink)
        steps = STEPS if scale.device != "cpu" else 2
        seconds: list[float] = []
        for _ in range(steps + 1):
            engine.add_request([rng.randrange(vocab) for _ in range(length)], once)
            wait(scale.device)
            began = time.perf_counter()
            engine.step()
            wait(scale.device)
            seconds.append(time.perf_counter() - began)
        found[length] = seconds[1:]  # the first step captures a graph
        engine.step()
    engine.abort()
    return found
