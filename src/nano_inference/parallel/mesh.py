"""`Mesh`: in how many ways a model is split; `Place`: where in it a rank stands."""

from dataclasses import dataclass
from typing import Literal, get_args

Axis = Literal["tensor", "pipeline", "context"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of one engine.

    Attributes:
        tensor: ranks that share every layer.
        pipeline: stages, each with layers of its own.
        context: ranks that share the keys and values of every sequence.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline * self.context

    def rank(self, stage: int, context_rank: int, tensor_rank: int) -> int:
        """The rank that stands there. Tensor neighbours are next to each other: they talk most."""
        return (stage * self.context + context_rank) * self.tensor + tensor_rank


@dataclass(frozen=True, slots=True)
class Place:
    """A rank of a mesh. Rank 0 is the engine's own process, which holds the scheduler."""

    mesh: Mesh = Mesh()
    rank: int = 0

    @property
    def tensor_rank(self) -> int:
        """Its place among the ranks that share its layers."""
        return self.rank % self.mesh.tensor

    @property
    def context_rank(self) -> int:
        """Its place among the ranks that share its keys and values."""
        return self.rank // self.mesh.tensor % self.mesh.context

    @property
    def stage(self) -> int:
        """Its stage of the pipeline."""
        return self.rank // (self.mesh.tensor * self.mesh.context)

    @property
    def is_first_stage(self) -> bool:
        """Whether it embeds."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it draws."""
        return self.stage == self.mesh.pipeline - 1

    @property
    def teller(self) -> "Place":
        """The rank whose samples count: the first of the last stage."""
        return Place(self.mesh, self.mesh.rank(self.mesh.pipeline - 1, 0, 0))

    def peers(self, axis: Axis) -> tuple[int, ...]:
        """Return the ranks of its group along one axis, itself too, in order."""
        places = (Place(self.mesh, rank) for rank in range(self.mesh.world_size))
        return tuple(place.rank for place in places if place._beside(axis) == self._beside(axis))

    def _beside(self, axis: Axis) -> tuple[int, ...]:
        """Its place along the other axes."""
        along = {
            "pipeline": self.stage,
            "context": self.context_rank,
            "tensor": self.tensor_rank,
        }
        return tuple(place for name, place in along.items() if name != axis)
