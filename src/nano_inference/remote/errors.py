"""Errors of remote engines. They are independent of HTTP: `server/errors.py` maps them to status
codes.
"""

from nano_inference.errors import EngineDead, NanoInferenceError


class EngineReplaced(EngineDead):
    """The engine died and lost its requests; a replacement is starting."""


class EngineRestarting(NanoInferenceError):
    """A replacement for a dead engine is being built. Retry in a few seconds."""

    def __init__(self) -> None:
        super().__init__("the engine is restarting.")


class ReaderTooSlow(NanoInferenceError):
    """A stream ended because its reader left too many tokens unread.

    Args:
        num_tokens: Number of unread tokens.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the client left {num_tokens} tokens unread; the stream was ended.")
