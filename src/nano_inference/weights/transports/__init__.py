"""Ways of weights from a trainer to an engine; each yields buckets until done, and none waits
beyond its deadline.

The classes are imported from their modules, since some of them need `torch.distributed`:

- `in_process.InProcess`: the tensors are here already.
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

__all__ = ["Deadline", "Incoming", "WeightTransport", "receive_update"]
