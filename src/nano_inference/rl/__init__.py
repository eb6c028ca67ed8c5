"""Training: the engine's logprobs bit for bit, gradients, replays, and reports on other trainers.

Imports only from: checkpoints, core, data, device, drafts, engine, models, ops, parallel, ranks,
sampling, structured, text, weights.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.rl.adamw import AdamW, clip_grad_norm_
    from nano_inference.rl.comparison import differences
    from nano_inference.rl.lora import LoraPolicy
    from nano_inference.rl.policy import PolicyModel
    from nano_inference.rl.portable import exact_sum, portable_exp
    from nano_inference.rl.ranks import one_rank
    from nano_inference.rl.replayer import replay
    from nano_inference.rl.report import MismatchReport, mismatch_report
    from nano_inference.rl.scoring import score, top_tokens
    from nano_inference.rl.verifier import Verdict, misplaced, verify
    from nano_inference.rl.workers import GradientShards, Workers

__all__ = [
    "AdamW",
    "GradientShards",
    "LoraPolicy",
    "MismatchReport",
    "PolicyModel",
    "Verdict",
    "Workers",
    "clip_grad_norm_",
    "differences",
    "exact_sum",
    "mismatch_report",
    "misplaced",
    "one_rank",
    "portable_exp",
    "replay",
    "score",
    "top_tokens",
    "verify",
]

_MODULES = {
    "AdamW": "adamw",
    "GradientShards": "workers",
    "LoraPolicy": "lora",
    "MismatchReport": "report",
    "PolicyModel": "policy",
    "Verdict": "verifier",
    "Workers": "workers",
    "clip_grad_norm_": "adamw",
    "differences": "comparison",
    "exact_sum": "portable",
    "mismatch_report": "report",
    "misplaced": "verifier",
    "one_rank": "ranks",
    "portable_exp": "portable",
    "replay": "replayer",
    "score": "scoring",
    "top_tokens": "scoring",
    "verify": "verifier",
}
__getattr__ = lazy(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
