"""Errors of an engine that runs elsewhere. None of them knows HTTP: `server/errors.py` says which
status answers each.
"""

from nano_inference.errors import EngineDead, NanoInferenceError


class EngineReplaced(EngineDead):
    """The engine has died with what it was doing, and another one is being started."""


class EngineRestarting(NanoInferenceError):
    """A new engine is being built in the place of a dead one; try again in some seconds."""

    def __init__(self) -> None:
        super().__init__("the engine is being started again.")


class ReaderTooSlow(NanoInferenceError):
    """A stream ended because its reader left too many tokens unread.

    Args:
        num_tokens: that were unread.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the client left {num_tokens} tokens unread, and the stream was ended.")
