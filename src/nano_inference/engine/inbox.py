"""What the loop can be told between two steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from nano_inference.scheduling.sequence import Sequence
from nano_inference.types import KvPolicy


@dataclass(frozen=True, slots=True)
class Add:
    """A new sequence."""

    sequence: Sequence
    posted: float = field(default_factory=perf_counter, compare=False)


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests (None: all) with what they have."""

    request_ids: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class ChangeWeights:
    """Call `write` when nothing is in flight; it returns the new version of `weight_set`, or None
    if it failed.

    With `wait` and `finish_old` it may have to wait, and later updates behind it. `version` is the
    one that `write` will return, so that requests that come later can be held for it.
    """

    weight_set: str
    write: Callable[[], int | None]
    kv_policy: KvPolicy = "recompute"
    version: int | None = None
    # keep the old weights as `previous`; False: the update failed
    set_aside: Callable[[], bool] | None = None
    # whether it has failed, so that `write` will do nothing
    is_void: Callable[[], bool] = lambda: False


Message = Add | Abort | ChangeWeights
