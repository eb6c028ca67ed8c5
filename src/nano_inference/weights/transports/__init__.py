"""Transports of weights from a trainer to an engine. Each yields buckets until all have arrived,
and none waits beyond its deadline.

Import the classes from their modules, since some need `torch.distributed`:

- `files.WeightFolder`: safetensors files with a marker that is written last. `files.write_folder`
  writes them.
- `broadcast.BroadcastReceiver`: a `torch.distributed` broadcast. `sender.WeightSender` is the
  trainer's side.

`interface.receive_update` passes a transport's buckets to a `WeightSyncManager`, on separate
threads.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy
from nano_inference.weights.transports.interface import (
    Deadline,
    Incoming,
    Shapes,
    WeightTransport,
    receive_update,
)

if TYPE_CHECKING:
    from nano_inference.weights.transports.wire import flat_bucket as flat_bucket
    from nano_inference.weights.transports.wire import opened_bucket as opened_bucket

_lazy = lazy(__name__, {"flat_bucket": "wire", "opened_bucket": "wire"})


def __getattr__(name: str) -> object:
    if name in ("in_process", "InProcess"):
        raise ImportError(f"{name} was removed; pass the state dict to update_weights.")
    return _lazy(name)


__all__ = ["Deadline", "Incoming", "Shapes", "WeightTransport", "receive_update"]
