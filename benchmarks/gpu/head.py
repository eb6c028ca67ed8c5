"""The last operations of a step: the cost of drawing, and of outputs in addition to the token.

We have no kernel that draws without the logprob, so this module bounds the cost of logprobs from
above. A draw must read the logits once. All its time beyond that read counts as cost of logprobs.

The draws are captured and replayed, as in a step, because launches from Python would be limited by
the host. Draws with the best tokens run eagerly, as in a step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.card import seconds_of
from benchmarks.gpu.scale import Scale
from nano_inference import InferenceEngine, SamplingParams
from nano_inference.device.queues import queue_of
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch, to_device

CALLS = 20
VARIANTS: dict[str, dict[str, Any]] = {
    "draw": {},
    "draw, raw_logprobs": {"raw_logprobs": True},
    "draw, top_logprobs=5": {"top_logprobs": 5},
    "draw, top_p and top_k": {"top_p": 0.95, "top_k": 50},
}

EAGER = frozenset({"draw, top_logprobs=5"})


def batch_of(rows: int, device: str, **options: Any) -> SamplingBatch:
    """Return a batch with one draw from each row."""
    params = SamplingParams(temperature=0.6, **options)
    batch = sampling_batch([DrawRequest(params, row, (row, 0, 0)) for row in range(rows)])
    return to_device(batch, torch.device(device))


def token_alone(logits: Tensor, noise: Tensor) -> Tensor:
    """Draw without logprob, in plain torch: Gumbel's maximum with precomputed noise."""
    return torch.argmax(logits / 0.6 + noise, dim=-1)


@torch.inference_mode()
def measure(
    engine: InferenceEngine, rows: int, scale: Scale, read_rate: float
) -> dict[str, list[float]]:
    """Return the seconds of a call by name, and the time to read the logits once at the measured
    bandwidth.
    """
    model, device = engine.model, scale.device
    hidden = torch.randn(rows, model.spec.hidden_size, device=device).to(model.dtype)
    logits = model.logits(hidden)
    noise = -torch.log(torch.empty_like(logits).exponential_())
    calls = CALLS if device != "cpu" else 1
    runs: dict[str, Callable[[], Any]] = {
        "logits": lambda: model.logits(hidden),
        "token alone, torch": lambda: token_alone(logits, noise),
    }
    for name, options in VARIANTS.items():
        batch = batch_of(rows, device, **options)
        runs[name] = lambda batch=batch: model.ops.sample_logits(logits, batch)
    plain = batch_of(rows, device)
    runs["logits and draw"] = lambda: model.draw(hidden, plain)
    queue = queue_of(torch.device(device))
    found = {"reading the logits": [logits.nbytes / read_rate] * scale.repeats}
    with queue.current():
        pool = queue.new_pool()
        for name, run in runs.items():
            timed = run if name in EAGER else queue.capture(run, pool).replay
            found[name] = seconds_of(timed, device, scale.repeats, calls)
    return found
