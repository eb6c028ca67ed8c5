"""Sleep of an engine whose memory keeps its addresses."""

import contextlib
from collections.abc import Callable, Iterable

import torch

from nano_inference.device.driver import DriverError
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.pools import Pool
from nano_inference.device.sleep import Sleep, memory_of, tensors_of
from nano_inference.models.decoder import Decoder
from nano_inference.types import Memory


class PooledSleep(Sleep):
    """Released memory of a pool, and of the few tensors outside of it.

    Args:
        pool: Pool to release.
        others: Function that releases the tensors outside of the pool.
        keep: True to copy the contents to the host. Otherwise they are lost.

    Raises `OSError`, with nothing released, if the contents cannot be saved.
    """

    def __init__(self, pool: Pool, others: Callable[[], Sleep], *, keep: bool) -> None:
        self._pool, self._keep = pool, keep
        if keep:
            pool.save()
        try:
            self._others = others()
        except OSError:
            pool.forget()
            raise
        pool.release()
        torch.cuda.empty_cache()  # workspace of eager steps

    def end(self) -> None:
        """Map memory to the same addresses and restore the contents bit for bit.

        Raises `torch.OutOfMemoryError` if the card lacks memory. The engine then stays asleep.
        """
        self._pool.regain()
        try:
            self._others.end()
        except torch.OutOfMemoryError:
            self._pool.release()
            raise
        if self._keep:
            self._pool.restore()

    def forget(self) -> None:
        """Delete the saved contents."""
        self._others.forget()
        with contextlib.suppress(DriverError):  # the card may have failed
            self._pool.forget()


def give_back_pool(
    pool: Pool, memory: Memory, storages: Iterable[KVStorage], models: Iterable[Decoder]
) -> Sleep:
    """Release the memory of the weights or the KV cache, with its addresses kept.

    Tensors outside of the pool move, such as those of weights that an update has set aside. Only
    the recorded work of their models is dropped.

    Raises `OSError`, with nothing released.
    """
    models, keep = list(models), memory == "weights"
    moving = [each for each in tensors_of(memory, storages, models) if not pool.holds(each)]
    if memory == "weights":
        models = [
            model
            for model in models
            if not all(pool.holds(memory_of(param)) for param in model.params.values())
        ]

    def others() -> Sleep:
        return Sleep(moving, models if moving else (), keep=keep and bool(moving))

    return PooledSleep(pool, others, keep=keep)
