"""`Mesh`: split of a model over ranks. `Place`: position of a rank within it."""

from dataclasses import dataclass
from typing import Literal, get_args

Axis = Literal["tensor", "pipeline", "context"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks of one engine.

    Attributes:
        tensor: Number of ranks that share every layer.
        pipeline: Number of stages with different layers.
        context: Number of ranks that share the keys and values of every sequence.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.tensor * self.pipeline * self.context

    def rank(self, stage: int, context_rank: int, tensor_rank: int) -> int:
        """Return the rank at a position.

        Tensor ranks are adjacent, because they communicate most.
        """
        return (stage * self.context + context_rank) * self.tensor + tensor_rank


@dataclass(frozen=True, slots=True)
class Place:
    """Rank of a mesh. Rank 0 is the engine's own process, which runs the scheduler."""

    mesh: Mesh = Mesh()
    rank: int = 0

    @property
    def tensor_rank(self) -> int:
        """Index among the ranks that share its layers."""
        return self.rank % self.mesh.tensor

    @property
    def context_rank(self) -> int:
        """Index among the ranks that share its keys and values."""
        return self.rank // self.mesh.tensor % self.mesh.context

    @property
    def stage(self) -> int:
        """Stage of the pipeline."""
        return self.rank // (self.mesh.tensor * self.mesh.context)

    @property
    def is_first_stage(self) -> bool:
        """True if this rank embeds tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank draws samples."""
        return self.stage == self.mesh.pipeline - 1

    @property
    def teller(self) -> "Place":
        """Rank that reports samples: the first one of the last stage."""
        return Place(self.mesh, self.mesh.rank(self.mesh.pipeline - 1, 0, 0))

    def peers(self, axis: Axis) -> tuple[int, ...]:
        """Return the ranks of its group along one axis in order, including itself."""
        places = (Place(self.mesh, rank) for rank in range(self.mesh.world_size))
        return tuple(place.rank for place in places if place._beside(axis) == self._beside(axis))

    def _beside(self, axis: Axis) -> tuple[int, ...]:
        """Return its position along the other axes."""
        along = {
            "pipeline": self.stage,
            "context": self.context_rank,
            "tensor": self.tensor_rank,
        }
        return tuple(place for name, place in along.items() if name != axis)
