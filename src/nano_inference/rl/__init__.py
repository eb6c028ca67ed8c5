"""The trainer's side: logprobs of given tokens, and a policy whose logprobs are the engine's to the bit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nano_inference.rl.policy import PolicyModel
    from nano_inference.rl.policy import PolicyModel
    from nano_inference.rl.score import score

__all__ = ["PolicyModel", "score"]

_MODULES = {"PolicyModel": "nano_inference.rl.policy", "score": "nano_inference.rl.score"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
