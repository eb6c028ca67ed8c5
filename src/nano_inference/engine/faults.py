"""Why an engine has died, and what to change."""

from typing import NamedTuple

import torch

from nano_inference.config import EngineConfig
from nano_inference.engine.device import is_device_failure
from nano_inference.engine.loop import Add, EngineLoop
from nano_inference.errors import RankLost, one_line


class Why(NamedTuple):
    """A reason, and the same without what an exception said: see `EngineDead.public`."""

    text: str
    public: str


def why(problem: Exception, config: EngineConfig, loop: EngineLoop | None = None) -> Why:
    """Why an engine has died of what a step raised; out of memory, which settings to change and to
    what; of a rank that was lost, which requests are.
    """
    if isinstance(problem, RankLost) and loop is not None:
        added = [message.sequence.request_id for message in loop.inbox if isinstance(message, Add)]
        lost = sorted({*added, *(seq.request_id for seq in loop.sequences.by_id.values())})
        told = f"requests lost: {', '.join(map(str, lost))}" if lost else "no request is lost"
        return Why(f"{problem}; {told}", f"a rank of the engine is lost; {told}")
    if isinstance(problem, torch.OutOfMemoryError):
        share, tokens = config.gpu_memory_utilization, config.max_tokens_per_batch
        advice = [f"gpu_memory_utilization from {share:g} to {max(share - 0.05, share / 2):.2f}"]
        if tokens > 1:
            advice.append(f"max_tokens_per_batch from {tokens} to {tokens // 2}")
        public = f"a step ran out of the device's memory; lower {' or '.join(advice)}"
        return Why(f"{public} ({one_line(problem)})", public)
    if is_device_failure(problem):  # such texts are the driver's or ours
        text = (
            "a step failed on the device, which this process cannot use any more: "
            f"{one_line(problem)}"
        )
        return Why(text, text)
    return failed("a step failed", problem)


def failed(what: str, problem: BaseException) -> Why:
    """That something failed, and of what."""
    name = type(problem).__name__
    return Why(f"{what}: {name}: {problem}", f"{what}: {name}")
