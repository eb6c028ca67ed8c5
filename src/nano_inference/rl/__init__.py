"""The trainer's side: logprobs that are the engine's to the bit, gradients, replays, reports on
other trainers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nano_inference.rl.comparison import differences
    from nano_inference.rl.lora import LoraPolicy
    from nano_inference.rl.policy import PolicyModel
    from nano_inference.rl.replayer import replay
    from nano_inference.rl.report import MismatchReport, mismatch_report
    from nano_inference.rl.scoring import score

__all__ = [
    "LoraPolicy",
    "MismatchReport",
    "PolicyModel",
    "differences",
    "mismatch_report",
    "replay",
    "score",
]

# No module may bear the name of what it holds: importing it would set that name, here, to the
# module.
_MODULES = {
    "LoraPolicy": "lora",
    "MismatchReport": "report",
    "PolicyModel": "policy",
    "differences": "comparison",
    "mismatch_report": "report",
    "replay": "replayer",
    "score": "scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"nano_inference.rl.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
