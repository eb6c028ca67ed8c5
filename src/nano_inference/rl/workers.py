"""Data-parallel training: several processes compute the gradients of one step.

Each worker has an engine and a policy of its own. A step's batch is cut into shards, whose number
does not depend on that of the workers. The gradients of the shards are added in a tree, neighbors
first, so 1, 2, 4 … workers end with the same bits.
"""

import weakref
from types import TracebackType
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from nano_inference import __version__
from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.ranks.torchrun import environment, own_address, torchrun_store
from nano_inference.rl.parameter_states import parameters_sha256
from nano_inference.rl.scoring_module import ScoringModule

PATIENCE = 1800.0  # seconds that a worker may take while others wait
ROOM = "nano-inference/workers"

dist: Any = torch.distributed  # its stubs lack much of what it exports


class Workers:
    """Processes that train one policy together.

    All workers call the same methods in the same order. Without a group, there is only this one.

    Args:
        group: Their process group, on CPUs. `meet` makes one.

    Raises `ConfigError` if the number of workers is not a power of two.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        if self.size & (self.size - 1):
            raise ConfigError(f"{self.size} workers were started; start 1, 2, 4, 8 ….")

    @classmethod
    def meet(cls, patience: float = PATIENCE) -> "Workers":
        """Connect the processes that torchrun has started, by gloo.

        Args:
            patience: Timeout of each wait for another worker in seconds. A worker that exits is
                noticed at once.

        Raises `ConfigError` outside of torchrun and for a number of processes that is not a power
        of two, `RankLost` if they do not connect in time.
        """
        variables = environment()
        size, here = int(variables["WORLD_SIZE"]), variables["LOCAL_WORLD_SIZE"]
        everybody = here == variables["WORLD_SIZE"]
        host = "127.0.0.1" if everybody else own_address(variables["MASTER_ADDR"])
        if size == 1:
            return cls()
        store = dist.PrefixStore(ROOM, torchrun_store())
        rank, device = int(variables["RANK"]), torch.device("cpu")
        return cls(ProcessGroup.meet(store, rank, size, device, patience, host))

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""
        return 0 if self._group is None else self._group.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return 1 if self._group is None else self._group.size

    def shards(self, num_shards: int) -> range:
        """Return the numbers of this worker's shards.

        Raises `ConfigError` unless `num_shards` is a power of two and at least the number of
        workers.
        """
        if num_shards < 1 or num_shards & (num_shards - 1):
            raise ConfigError(f"num_shards={num_shards} must be 1, 2, 4, 8 ….")
        if num_shards < self.size:
            raise ConfigError(
                f"num_shards={num_shards} is less than the {self.size} workers; choose at least "
                f"{self.size}."
            )
        count = num_shards // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def gather(self, data: bytes) -> list[bytes]:
        """Return every worker's bytes, by rank. Raises `RankLost`."""
        if self._group is None:
            return [data]
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _no_bytes()
        return [bytes(part.numpy()) for part in self._group.all_to_all([sent] * self.size)]

    def total(self, count: int) -> int:
        """Return the sum of every worker's count. Raises `RankLost`."""
        return sum(int(data) for data in self.gather(str(count).encode()))

    def require_same(self, name: str, value: str) -> None:
        """Raise `ConfigError`, on every worker, unless all workers have the same value."""
        values = [data.decode() for data in self.gather(value.encode())]
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ConfigError(
                    f"worker {rank} has {name} {other!r}, worker 0 has {values[0]!r}; start all "
                    "workers with the same."
                )

    def tree_sum(self, tensor: Tensor) -> Tensor:
        """Return the float32 sum of every worker's tensor, neighbors first. Raises `RankLost`."""
        return tensor.float() if self._group is None else self._group.tree_sum(tensor)

    def close(self) -> None:
        """Leave the group. Workers that wait for this one get `RankLost`."""
        if self._group is not None:
            self._group.close()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class GradientShards:
    """Gradients of a step's shards, added in an order that the number of workers does not change.

    After the backward pass of each of its shards (`mine`), in order, a worker calls `add`. After
    the last one, `finish` gives every worker the gradients of the whole step:

        for shard in shards.mine:
            loss_of(shard).backward()
            shards.add()
        shards.finish()
        optimizer.step()
        optimizer.zero_grad()

    A worker holds at most log2 of its number of shards + 1 copies of the gradients, in float32.

    Args:
        policy: This worker's `PolicyModel` or `LoraPolicy`.
        num_shards: Number of shards of a step on all workers together, a power of two. Another
            number changes the last bits of gradients.
        workers: The workers. None: only this one.

    Raises `ConfigError` if the workers differ in their version of nano-inference, numerics,
    parameters, or number of shards.
    """

    def __init__(
        self, policy: ScoringModule, num_shards: int, workers: Workers | None = None
    ) -> None:
        self.workers = Workers() if workers is None else workers
        self.mine = self.workers.shards(num_shards)
        for name, value in (
            ("nano-inference", __version__),
            ("num_shards", str(num_shards)),
            ("numerics", policy.engine.numerics.fingerprint),
            ("parameters with SHA-256", parameters_sha256(policy.named_parameters())),
        ):
            self.workers.require_same(name, value)
        self._params = [param for param in policy.parameters() if param.requires_grad]
        # sums of 2^k neighboring shards with their k, larger ones first
        self._sums: list[tuple[int, list[Tensor | None]]] = []
        self._num_added = 0
        self._finished: list[weakref.ref[Tensor]] = []  # gradients of the last step

    def add(self) -> None:
        """Take the parameters' gradients as those of the next shard, and set them to None.

        Raises `InvalidRequest` after the last shard, and if the last step's gradients were not
        cleared before.
        """
        if self._num_added == len(self.mine):
            raise InvalidRequest(
                f"all {len(self.mine)} shards of this worker were added; call finish()."
            )
        stale = {id(grad) for grad in (ref() for ref in self._finished) if grad is not None}
        if any(id(param.grad) in stale for param in self._params):
            raise InvalidRequest(
                "the gradients of the last step are still set, so this shard's were added to them; "
                "call optimizer.zero_grad() after optimizer.step()."
            )
        level, total = 0, [_taken(param) for param in self._params]
        while self._sums and self._sums[-1][0] == level:
            _, earlier = self._sums.pop()
            total = [_sum(*pair) for pair in zip(earlier, total, strict=True)]
            level += 1
        self._sums.append((level, total))
        self._num_added += 1

    def finish(self) -> None:
        """Set the gradients of this worker's parameters to the sum over all shards.

        Parameters without a gradient in any shard get None. Raises `InvalidRequest` before the
        last shard was added, and `RankLost` if another worker has exited.
        """
        if self._num_added < len(self.mine):
            raise InvalidRequest(
                f"{self._num_added} of this worker's {len(self.mine)} shards were added; add the "
                "others before finish()."
            )
        ((_, totals),) = self._sums
        self._sums, self._num_added, self._finished = [], 0, []
        mine = bytes(total is not None for total in totals)
        somewhere = [any(flags) for flags in zip(*self.workers.gather(mine), strict=True)]
        for param, total, wanted in zip(self._params, totals, somewhere, strict=True):
            if wanted:
                # x + -0.0 has the bits of x for every x
                addend = torch.full_like(param, -0.0) if total is None else total
                param.grad = self.workers.tree_sum(addend).to(param.dtype)
                self._finished.append(weakref.ref(param.grad))


def _taken(param: nn.Parameter) -> Tensor | None:
    grad, param.grad = param.grad, None
    return None if grad is None else grad.float()


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _no_bytes() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
