"""`Refused`: what the service does not do, in the two forms that the client reads."""

import logging
from typing import Literal

from nano_inference.errors import ModelLoadError, NanoInferenceError

log = logging.getLogger("nano_training_service")

# The client retries or gives up by it: "user" is the request's own fault, "server" is not.
Category = Literal["user", "server"]


class Refused(NanoInferenceError):
    """A request that cannot be served as it stands.

    Attributes:
        status: of the HTTP answer where the request is refused at once. Inside a future the answer
            is 200 and says `{"error": ..., "category": ...}`.
        category: whose fault it is.
    """

    def __init__(self, message: str, status: int = 400, category: Category = "user") -> None:
        super().__init__(message)
        self.status = status
        self.category: Category = category


def refusal_of(problem: BaseException, what: str) -> Refused:
    """The answer to what `what` raised. Anything unknown is our bug: the log has it, and the answer
    tells nothing.
    """
    match problem:
        case Refused():
            return problem
        case ModelLoadError():
            return Refused(str(problem))
        case NanoInferenceError() if isinstance(problem, ValueError):  # what was asked is wrong
            return Refused(str(problem))
        case TimeoutError():
            return Refused("the request did not end before its deadline.", 504, "server")
        case _:
            log.error("%s failed", what, exc_info=problem)
            text = "something went wrong in the service; its log says what."
            return Refused(text, 500, "server")
