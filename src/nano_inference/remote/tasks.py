"""Tasks that are not awaited."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def start_task(work: Coroutine[Any, Any, T], tasks: "set[asyncio.Task[T]]") -> "asyncio.Task[T]":
    """Run it, on this thread's event loop. Until it ends it stands among `tasks`: the loop alone
    would not keep it.
    """
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
