"""The worker's side of an exchange in JSON lines. Uses only the standard library, because it runs
in the peers' environments.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import IO, Any


def open_channel() -> IO[str]:
    """Return the stream for answers: the standard output, which nothing else writes to from now on.

    Call it before you import anything that prints.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(
    answers: IO[str], answer: Callable[[dict[str, Any]], dict[str, Any]], ready: dict[str, Any]
) -> None:
    """Report that the worker is ready, then answer questions until the sender closes."""
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
