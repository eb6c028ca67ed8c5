"""The service's records of its clients: sessions, and models in training."""

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from nano_training_service.checkpoints import Run
from nano_training_service.errors import Refused
from nano_training_service.futures import Future
from nano_training_service.messages import CreateSession
from nano_training_service.samplers import Weights
from nano_training_service.trainer import Trainer
from nano_training_service.training_thread import Job


@dataclass
class Model:
    """A model in training and its waiting requests.

    Attributes:
        trainer: Trainer of the model. None until the training thread has built it.
        next_seq: Sequence number of the next request to run.
        waiting: Requests that arrived before their predecessors, by sequence number.
        inflight: Weights that samplers of kind "inflight" follow.
        snapshots: Folders of unnamed sampler weights, by number, oldest first.
    """

    run: Run
    session: "Session"
    trainer: Trainer | None = None
    next_seq: int = 1
    waiting: dict[int, Job] = field(default_factory=dict[int, Job])
    inflight: Weights = field(default_factory=lambda: Weights(None))
    snapshots: OrderedDict[int, Path] = field(default_factory=OrderedDict[int, Path])
    num_snapshots: int = 0

    def require_trainer(self) -> Trainer:
        """Return the trainer, on the training thread. Raises `Refused` if the model could not be
        built or its session has ended.
        """
        if self.trainer is None or self.session.ended:
            raise Refused(f"the model {self.run.run_id!r} could not be built, or has ended.", 410)
        return self.trainer


@dataclass
class Session:
    """A client's session."""

    session_id: str
    about: CreateSession
    seen: float
    ended: bool = False
    models: dict[str, Model] = field(default_factory=dict[str, Model])
    samplers: dict[str, Weights] = field(default_factory=dict[str, Weights])
    sampling: set[Future] = field(default_factory=set[Future])
    num_clones: int = 0
