"""`Control`: operations by which trainers of any dialect change the engine."""

from nano_inference.remote.client import EngineClient
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.adapters import Adapters
from nano_inference.server.control.checksums import Checksums
from nano_inference.server.control.engine import Engine
from nano_inference.server.control.pauses import MemoryParts, Pauses
from nano_inference.server.control.updates import Groups, Updates


class Control:
    """Operations of trainers on the engine. Only one update is open at a time. A call out of order
    is rejected, and the old version keeps serving.

    Every method of a part raises `ApiError` and the errors of `EngineClient.call`. The status is
    409 for a wrong order, a second trainer or sleeping weights. It is 400 for names, shapes and
    types that do not match, and 504 for a deadline.

    Attributes:
        engine: The engine, and the server's state about it, such as the names of its versions.
        groups: Process groups with the trainer.
        updates: Weight updates.
        pauses: Pauses of the engine, and aborts of its requests.
        memory: Parts of the engine's memory that sleep and wake, and the prefix cache.
        adapters: LoRA adapters that requests may name.
        checksums: Checks of the served weights.
    """

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.engine = Engine(client, config)
        self.groups = Groups(self.engine)
        self.updates = Updates(self.engine)
        self.pauses = Pauses(self.engine)
        self.memory = MemoryParts(self.engine, self.updates)
        self.adapters = Adapters(self.engine)
        self.checksums = Checksums(self.engine)
