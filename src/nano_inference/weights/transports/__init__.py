"""Ways of weights from a trainer to an engine; each yields buckets until done, and none waits
beyond its deadline.

The classes are imported from their modules, since some of them need `torch.distributed`:

- `files.WeightFolder`: safetensors files with a marker that is written last; `files.write_folder`
  writes them.
- `broadcast.BroadcastReceiver`: a `torch.distributed` broadcast; `sender.WeightSender` is the
  trainer's side.

`interface.receive_update` runs one of them into a `WeightSyncManager` on threads of its own.
"""

from nano_inference.weights.transports.interface import (
    Deadline,
    Incoming,
    WeightTransport,
    receive_update,
)


def __getattr__(name: str) -> object:
    if name in ("in_process", "InProcess"):
        raise ImportError(f"{name} is removed; give the state dict to update_weights.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Deadline", "Incoming", "WeightTransport", "receive_update"]
