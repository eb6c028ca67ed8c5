"""`RequestRecord`: what log lines and metrics say about a request; whoever learns something writes
it here.
"""

import re
import secrets
import time
from dataclasses import dataclass, field

from starlette.types import Scope

# printable ASCII, no spaces: safe in headers, logs and JSON
_SANE = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request.

    Attributes:
        request_id: the client's `x-request-id`, or one made here.
        method, path: of the request line, the path decoded; not to be trusted.
        status: of the answer; 0: none has begun.
        session: the client's `x-session-id`: its requests go to one replica.
        has_version: it has an `anthropic-version` header.
        model: that was asked for, where the body could be read.
        num_samples, prompt_tokens, cached_tokens, completion_tokens: of a generation.
        first_token: seconds from its arrival to its first tokens; None: it had none, or did not
            stream.
        seconds: from its arrival to the end of its answer.
        problem: the code or message of the error it ended in.
        started: `time.perf_counter()` at its arrival.
    """

    request_id: str
    method: str
    path: str
    session: str | None = None
    has_version: bool = False
    status: int = 0
    model: str | None = None
    num_samples: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    seconds: float = 0.0
    problem: str | None = None
    started: float = field(default_factory=time.perf_counter)


def request_id_of(header: bytes | None) -> str:
    """The client's own where it can be echoed and logged as it is, else a new one."""
    if header is not None and _SANE.fullmatch(header):
        return header.decode("ascii")
    return f"req_{secrets.token_hex(16)}"


def session_of(header: bytes | None) -> str | None:
    """The client's `x-session-id`; what no sane client sends is none."""
    return header.decode("ascii") if header is not None and _SANE.fullmatch(header) else None


def record_of(scope: Scope) -> RequestRecord:
    """That of the request with this scope."""
    return scope["state"]["record"]
