"""Sequences cut into fixed micro-batches of rows, in which a beginning that sequences have in
common stands once.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from nano_inference.sampling.sampling_batch import mask_columns
from nano_inference.sampling.tensors import TORCH


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """A sequence, and what the loss gives each logprob of its tokens from `start` on, none before
    position 1; and the mask of each of them, int32 [W], where there are masks. `targets`, as many
    in each place, have the logprobs in the place of its tokens; empty: the tokens themselves.
    """

    token_ids: list[int]
    start: int
    gradients: list[float]
    # int16 [rows, layers of experts, K]: the experts of at least its rows with gradients
    routes: Tensor | None = None
    masks: Sequence[np.ndarray] = ()
    targets: Sequence[Sequence[int]] = ()

    def wanted(self) -> list[tuple[int, int, float]]:
        """Each row that a gradient comes from, with its target and the gradient."""
        targets = self.targets or [[token] for token in self.token_ids[self.start :]]
        pairs = ((row, target) for row, own in enumerate(targets, self.start - 1) for target in own)
        return [
            (row, target, grad)
            for (row, target), grad in zip(pairs, self.gradients, strict=True)
            if grad != 0
        ]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring rows [start, end) of one sequence, and where its rows from the first to the last
    of them stand.
    """

    start: int
    end: int
    path: Tensor  # int64 [L]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows whose gradients are computed together. N rows, U of them with targets, P targets;
    integers are int64.
    """

    token_ids: Tensor  # [N]
    positions: Tensor  # [N]
    segments: tuple[Segment, ...]  # in the order of the rows
    scored_rows: Tensor  # [U] rows that have targets; one a mask
    mask_rows: Tensor  # [U] row of `mask_words`, -1: the targets have no mask
    mask_words: Tensor  # int32 [M, W]
    owners: Tensor  # [P] place of the target's row in `scored_rows`
    targets: Tensor  # [P] a token that is scored after that row; no place has one twice
    gradients: Tensor  # float32 [P] of its logprob
    # [N, layers of experts, K]: the experts that each row goes through
    routes: Tensor | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """The same with its tensors on another device."""
        if device.type == "cpu":
            return self
        moved = {name: value.to(device) for name, value in _tensors(self).items()}
        segments = tuple(replace(each, path=each.path.to(device)) for each in self.segments)
        return replace(self, segments=segments, **moved)


def micro_batches(sequences: Iterable[ScoredSequence], max_rows: int) -> Iterator[MicroBatch]:
    """Cut sequences, in their order, into micro-batches of at most `max_rows` rows; a longer
    sequence stands alone.

    Where sequences have routes all of them have, and those of a row that they share agree; else
    `RuntimeError`.

    The cut depends on the arguments alone, as the order of additions in a gradient does. Rows that
    no gradient comes from are left out, and so are whole sequences.
    """
    rows = _Rows()
    for sequence in sequences:
        wanted = sequence.wanted()
        if not wanted:
            continue
        last = wanted[-1][0]
        if (
            rows.num_rows
            and rows.num_rows + rows.num_new(sequence.token_ids[: last + 1]) > max_rows
        ):
            yield rows.freeze()
            rows = _Rows()
        path = rows.add(sequence.token_ids[: last + 1], sequence.routes)
        for row, token_id, grad in wanted:
            mask = sequence.masks[row + 1 - sequence.start] if sequence.masks else None
            target = (rows.scored(path[row], mask), token_id)
            rows.targets[target] = rows.targets.get(target, 0.0) + grad
    if rows.num_rows:
        yield rows.freeze()


@dataclass(slots=True)
class _Rows:
    """Rows as nodes of a tree of tokens."""

    # (parent, token) -> row
    children: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    token_ids: list[int] = field(default_factory=list[int])
    positions: list[int] = field(default_factory=list[int])
    segments: list[Segment] = field(default_factory=list[Segment])
    # one entry a row
    routes: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int16))
    # (row, address of its mask or 0) -> place among these
    places: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    # (place, mask) of those that have one
    masks: list[tuple[int, np.ndarray]] = field(default_factory=list[tuple[int, np.ndarray]])
    # (place, token) -> grad
    targets: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def num_new(self, token_ids: list[int]) -> int:
        """How many rows a sequence would add."""
        parent = -1
        for position, token_id in enumerate(token_ids):
            if (parent, token_id) not in self.children:
                return len(token_ids) - position
            parent = self.children[parent, token_id]
        return 0

    def add(self, token_ids: list[int], routes: Tensor | None = None) -> list[int]:
        """Add a sequence; returns the row of each of its tokens."""
        path: list[int] = []
        first, parent = self.num_rows, -1
        for position, token_id in enumerate(token_ids):
            row = self.children.setdefault((parent, token_id), self.num_rows)
            if row == self.num_rows:
                self.token_ids.append(token_id)
                self.positions.append(position)
            path.append(row)
            parent = row
        if self.num_rows > first:
            self.segments.append(Segment(first, self.num_rows, torch.tensor(path)))
        if routes is not None:
            self._add_routes(path, first, routes[: len(path)])
        return path

    def scored(self, row: int, mask: np.ndarray | None) -> int:
        """The place of a row that has targets under this mask."""
        key = (row, 0 if mask is None else id(mask))
        if key not in self.places:
            if mask is not None:
                self.masks.append((len(self.places), mask))
            self.places[key] = len(self.places)
        return self.places[key]

    def _add_routes(self, path: list[int], first: int, routes: Tensor) -> None:
        """Note the experts of the rows from `first` on; the others of the path have theirs
        already.
        """
        if len(routes) != len(path):
            raise RuntimeError(
                f"the experts of {len(routes)} rows are known, of {len(path)} that need them."
            )
        shared = bisect_left(path, first)  # rows of a path rise
        here = torch.cat([self.routes, routes[shared:]]) if len(self.routes) else routes
        if not torch.equal(here[path], routes):
            raise RuntimeError(
                "the engine chose other experts for a row than for the same row of another "
                "sequence."
            )
        self.routes = here

    def freeze(self) -> MicroBatch:
        return MicroBatch(
            token_ids=torch.tensor(self.token_ids),
            positions=torch.tensor(self.positions),
            segments=tuple(self.segments),
            scored_rows=torch.tensor([row for row, _ in self.places]),
            **mask_columns(TORCH, len(self.places), self.masks),
            owners=torch.tensor([place for place, _ in self.targets]),
            targets=torch.tensor([token_id for _, token_id in self.targets]),
            gradients=torch.tensor(list(self.targets.values()), dtype=torch.float32),
            routes=self.routes.long() if len(self.routes) else None,
        )


def _tensors(batch: MicroBatch) -> dict[str, Tensor]:
    values = {each.name: getattr(batch, each.name) for each in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
