"""The worker's end of a conversation in JSON lines. Standard library only: it runs in the peers'
own environments.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import IO, Any


def open_channel() -> IO[str]:
    """Where answers go: the standard output, which from now on nobody else writes to.

    Call it before anything is imported that prints.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(
    answers: IO[str], answer: Callable[[dict[str, Any]], dict[str, Any]], ready: dict[str, Any]
) -> None:
    """Say that the worker is ready, then answer questions until their sender closes."""
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
