"""Background tasks that no caller awaits."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def start_task(work: Coroutine[Any, Any, T], tasks: "set[asyncio.Task[T]]") -> "asyncio.Task[T]":
    """Run a coroutine on this thread's event loop.

    `tasks` holds the task until it ends, because the event loop keeps only a weak reference.
    """
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
