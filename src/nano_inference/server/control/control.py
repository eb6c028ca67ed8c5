"""`Control`: the parts by which a trainer changes the engine, whatever its dialect."""

from nano_inference.remote.client import EngineClient
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.adapters import Adapters
from nano_inference.server.control.checksums import Checksums
from nano_inference.server.control.engine import Engine
from nano_inference.server.control.pauses import MemoryParts, Pauses
from nano_inference.server.control.updates import Groups, Updates


class Control:
    """One update at a time; a call in a wrong order is rejected, and the old version serves.

    Every method of a part raises `ApiError` (409 for a wrong order, a second trainer, weights that
    are asleep; 400 for names, shapes and types that do not match; 504 for a deadline) and what
    `EngineClient.call` raises.

    Attributes:
        engine: the engine, and the facts that the server remembers of it, such as the names of
            its versions.
        groups: process groups with the trainer.
        updates: weight updates.
        pauses: pauses of the engine, and aborts of its requests.
        memory: parts of the engine's memory that sleep and wake, and the prefix cache.
        adapters: LoRA adapters that requests may name.
        checksums: checks of the weights that serve.
    """

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.engine = Engine(client, config)
        self.groups = Groups(self.engine)
        self.updates = Updates(self.engine)
        self.pauses = Pauses(self.engine)
        self.memory = MemoryParts(self.engine, self.updates)
        self.adapters = Adapters(self.engine)
        self.checksums = Checksums(self.engine)
