"""`Refused`: a rejected request, as an HTTP status or as the result of a future."""

import logging
from typing import Literal

from nano_inference.errors import ModelLoadError, NanoInferenceError

log = logging.getLogger("nano_training_service")

# The client gives up if the category is "user" (the request's own fault) and retries if "server".
Category = Literal["user", "server"]


class Refused(NanoInferenceError):
    """A request that the service rejects.

    Attributes:
        status: HTTP status if the request is rejected immediately. A rejection inside a future is
            sent with status 200 as `{"error": ..., "category": ...}`.
        category: Side at fault: the request ("user") or the service ("server").
    """

    def __init__(self, message: str, status: int = 400, category: Category = "user") -> None:
        super().__init__(message)
        self.status = status
        self.category: Category = category


def refusal_of(problem: BaseException, what: str) -> Refused:
    """Convert an exception raised by `what` to a rejection. An unexpected exception is a bug of
    the service: it is logged, and the client gets no details.
    """
    match problem:
        case Refused():
            return problem
        case ModelLoadError():
            return Refused(str(problem))
        case NanoInferenceError() if isinstance(problem, ValueError):  # the request is invalid
            return Refused(str(problem))
        case TimeoutError():
            return Refused("the request did not end before its deadline.", 504, "server")
        case _:
            log.error("%s failed", what, exc_info=problem)
            text = "internal error of the service; its log has the details."
            return Refused(text, 500, "server")
