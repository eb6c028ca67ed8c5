"""Sequences divided into fixed micro-batches of rows, with common prefixes stored once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from nano_inference.models.spec.experts import MoeSpec
from nano_inference.sampling.sampling_batch import mask_columns
from nano_inference.sampling.tensors import TORCH


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """A sequence, and the loss's gradient of each logprob from position `start` (at least 1) on.

    `masks` holds the mask of each token from `start` on, int32 [W]. Empty: no masks. `targets`
    holds the tokens that the logprobs belong to, equally many at each position from `start` on.
    Empty: the sequence's own tokens.
    """

    token_ids: list[int]
    start: int
    gradients: list[float]
    # int16 [rows, expert layers, K]: experts of at least the rows with gradients
    routes: Tensor | None = None
    masks: Sequence[np.ndarray] = ()
    targets: Sequence[Sequence[int]] = ()

    def wanted(self) -> list[tuple[int, int, float]]:
        """Return each row with a nonzero gradient, its target and the gradient."""
        targets = self.targets or [[token] for token in self.token_ids[self.start :]]
        pairs = ((row, target) for row, own in enumerate(targets, self.start - 1) for target in own)
        return [
            (row, target, grad)
            for (row, target), grad in zip(pairs, self.gradients, strict=True)
            if grad != 0
        ]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows [start, end) of one sequence, and the batch rows of its whole prefix."""

    start: int
    end: int
    path: Tensor  # int64 [L], from the sequence's first row to row end - 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows whose gradients are computed together: N rows, U of them with targets, P targets.

    Integer tensors are int64.
    """

    token_ids: Tensor  # [N]
    positions: Tensor  # [N]
    segments: tuple[Segment, ...]  # in the order of the rows
    scored_rows: Tensor  # [U] rows that have targets, once for each mask
    mask_rows: Tensor  # [U] row of `mask_words`, -1: the targets have no mask
    mask_words: Tensor  # int32 [M, W]
    owners: Tensor  # [P] index of the target's row in `scored_rows`
    targets: Tensor  # [P] token scored after that row, unique for each owner
    gradients: Tensor  # float32 [P] gradient of its logprob
    # [N, expert layers, K]: experts of each row
    routes: Tensor | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the batch with its tensors on another device."""
        if device.type == "cpu":
            return self
        moved = {name: value.to(device) for name, value in _tensors(self).items()}
        segments = tuple(replace(each, path=each.path.to(device)) for each in self.segments)
        return replace(self, segments=segments, **moved)

    def experts_by_layer(
        self, moe: MoeSpec | None, device: torch.device | None = None
    ) -> dict[int, Tensor]:
        """Return the engine's choice of experts by layer, [N, K], rising in each row, on a device
        (None: that of the batch).

        Raises `RuntimeError` if there is no choice for each row and layer.
        """
        if moe is None:
            return {}
        shape = (len(self.token_ids), sum(moe.layers), moe.experts_per_token)
        routes = self.routes
        if routes is None or tuple(routes.shape) != shape:
            actual = None if routes is None else tuple(routes.shape)
            raise RuntimeError(
                f"the engine's choice of experts has shape {actual}; the rows need {shape}."
            )
        rising = bool((routes.diff(dim=-1) > 0).all()) and bool(
            ((routes >= 0) & (routes < moe.num_experts)).all()
        )
        if not rising:
            raise RuntimeError("the engine's choice of experts is missing or invalid for a row.")
        mixed = [layer for layer, has_experts in enumerate(moe.layers) if has_experts]
        return dict(zip(mixed, routes.to(device or routes.device).unbind(1), strict=True))


def micro_batches(sequences: Iterable[ScoredSequence], max_rows: int) -> Iterator[MicroBatch]:
    """Divide sequences, in order, into micro-batches of at most `max_rows` rows.

    A longer sequence gets its own batch. Either all sequences have routes or none. Sequences share
    a row if its prefix and the experts of all its tokens are equal. Raises `RuntimeError` if a
    sequence has too few routes.

    The division depends only on the arguments, and so does the order of additions in a gradient.
    Rows after a sequence's last gradient are left out, and so are sequences without any gradient.
    """
    rows = _Rows()
    for sequence in sequences:
        wanted = sequence.wanted()
        if not wanted:
            continue
        last = wanted[-1][0]
        nodes, routes = _nodes(sequence, last + 1)
        if rows.num_rows and rows.num_rows + rows.num_new(nodes) > max_rows:
            yield rows.freeze()
            rows = _Rows()
        path = rows.add(nodes, routes)
        for row, token_id, grad in wanted:
            mask = sequence.masks[row + 1 - sequence.start] if sequence.masks else None
            target = (rows.scored(path[row], mask), token_id)
            rows.targets[target] = rows.targets.get(target, 0.0) + grad
    if rows.num_rows:
        yield rows.freeze()


Node = tuple[int, bytes]  # a token, and the experts of its row


def _nodes(sequence: ScoredSequence, count: int) -> tuple[list[Node], Tensor | None]:
    """Return the first nodes of a sequence and their routes."""
    ids = sequence.token_ids[:count]
    if sequence.routes is None:
        return [(token_id, b"") for token_id in ids], None
    routes = sequence.routes[:count]
    if len(routes) != count:
        raise RuntimeError(f"the routes have {len(routes)} rows; {count} rows need experts.")
    data, size = routes.contiguous().numpy().tobytes(), routes[0].nbytes
    chosen = (data[at : at + size] for at in range(0, len(data), size))
    return list(zip(ids, chosen, strict=True)), routes


@dataclass(slots=True)
class _Rows:
    """Rows as a tree of nodes."""

    # (parent, node) -> row
    children: dict[tuple[int, Node], int] = field(default_factory=dict[tuple[int, Node], int])
    token_ids: list[int] = field(default_factory=list[int])
    positions: list[int] = field(default_factory=list[int])
    segments: list[Segment] = field(default_factory=list[Segment])
    # one entry for each row
    routes: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int16))
    # (row, address of its mask or 0) -> index in `MicroBatch.scored_rows`
    places: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    # (index in `scored_rows`, mask) of the entries with a mask
    masks: list[tuple[int, np.ndarray]] = field(default_factory=list[tuple[int, np.ndarray]])
    # (index in `scored_rows`, token) -> gradient
    targets: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def num_new(self, nodes: list[Node]) -> int:
        """Return how many rows a sequence would add."""
        parent = -1
        for position, node in enumerate(nodes):
            if (parent, node) not in self.children:
                return len(nodes) - position
            parent = self.children[parent, node]
        return 0

    def add(self, nodes: list[Node], routes: Tensor | None = None) -> list[int]:
        """Add a sequence and return the row of each of its nodes."""
        path: list[int] = []
        first, parent = self.num_rows, -1
        for position, node in enumerate(nodes):
            row = self.children.setdefault((parent, node), self.num_rows)
            if row == self.num_rows:
                self.token_ids.append(node[0])
                self.positions.append(position)
            path.append(row)
            parent = row
        num_new = self.num_rows - first  # the last nodes of the path
        if num_new:
            self.segments.append(Segment(first, self.num_rows, torch.tensor(path)))
        if num_new and routes is not None:
            here = routes[-num_new:]
            self.routes = torch.cat([self.routes, here]) if first else here
        return path

    def scored(self, row: int, mask: np.ndarray | None) -> int:
        """Return the index of a row that has targets under this mask."""
        key = (row, 0 if mask is None else id(mask))
        if key not in self.places:
            if mask is not None:
                self.masks.append((len(self.places), mask))
            self.places[key] = len(self.places)
        return self.places[key]

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
