"""`StatelessProcessGroup`: a store that a trainer serves, and the objects that it sends through
it.
"""

import pickle
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed

_TIMEOUT = 300  # seconds


@dataclass
class StatelessProcessGroup:
    """Group of processes that need no default group of torch.

    Attributes:
        rank: This rank. The trainer is rank 0.
        world_size: Number of ranks.
        store: Store that rank 0 serves. None ends the group.
    """

    rank: int
    world_size: int
    store: Any
    broadcast_send_counter: int = 0

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """Send an object to all ranks, and return it.

        Only the trainer sends. To receive one, a process would have to execute a pickle. Raises
        `RuntimeError` if another rank sends.
        """
        if src != self.rank:
            raise RuntimeError(
                f"rank {src} sends an object, which rank {self.rank} does not read, since it is a "
                "pickle; only the trainer sends."
            )
        self.store.set(f"broadcast_from/{src}/{self.broadcast_send_counter}", pickle.dumps(obj))
        self.broadcast_send_counter += 1
        return obj

    @staticmethod
    def create(
        host: str,
        port: int,
        rank: int,
        world_size: int,
        store_timeout: int = _TIMEOUT,
        listen_socket: socket.socket | None = None,
        **_: Any,
    ) -> "StatelessProcessGroup":
        """Serve the store as rank 0, or connect to it, and wait until all ranks have connected."""
        if rank == 0 and listen_socket is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listen_socket = socket.create_server((host, port), family=family)
        distributed: Any = torch.distributed  # its stubs lack much of what it exports
        store = distributed.TCPStore(
            host,
            port,
            world_size,
            rank == 0,
            timedelta(seconds=store_timeout),
            master_listen_fd=None if listen_socket is None else listen_socket.detach(),
        )
        return StatelessProcessGroup(rank, world_size, store)
