"""Worker's part of an engine: its shard of the models, driven by messages."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from nano_inference.core.sequence import POLICY
from nano_inference.device.backends import choose_device
from nano_inference.device.sleep import Sleep
from nano_inference.errors import ConfigError
from nano_inference.models.parameters.slots import named_slots
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from nano_inference.ranks.adapters import HeldAdapters
from nano_inference.ranks.assembly import config_here, digest_of, process_groups, rank_of
from nano_inference.ranks.build import plan_engine
from nano_inference.ranks.messages import Begin, Build, Size
from nano_inference.ranks.parts import assemble
from nano_inference.ranks.replay import Draw, Forward, StepReplay
from nano_inference.ranks.samples import Samples, to_message
from nano_inference.ranks.sharing import PIECE_BYTES, StagedUpdates


class Shard:
    """One rank's part of an engine.

    The constructor connects to the other ranks and agrees on the KV cache.

    Raises `ConfigError` or `ModelLoadError`.
    """

    def __init__(
        self, build: Build, begin: Begin, planned: Callable[[], None], agree: Callable[[Size], Size]
    ) -> None:
        config = config_here(build.config, build.ranks_here, begin.local_rank)
        device = choose_device(config.device)
        plan = plan_engine(config)
        if digest_of(plan) != build.model:
            raise ConfigError(
                f"config.json of model_path={config.model_path!r} differs from rank 0's."
            )
        if plan.numerics.fingerprint != build.numerics:
            raise ConfigError(
                f"the numerics are {plan.numerics.fingerprint}, but {build.numerics} on rank 0; "
                "use the same backend, device and torch on all ranks."
            )
        planned()
        make, self._groups = process_groups(
            build.meeting, begin.rank, device, build.timeout, begin.host
        )
        rank = rank_of(config, begin.rank, build.ranks_here, make, agree)
        parts = assemble(config, rank=rank)
        self.runner = parts.runner
        self.place = rank.mesh_place
        self._adapters = HeldAdapters(self.runner.models[POLICY])
        self._steps = StepReplay(config.block_size, parts.cache.units, self._adapters)
        self._result: Any = None
        self._drawn: deque[Any] = deque()  # samples of the latest steps, the newest last
        self._asleep: dict[str, Sleep] = {}
        self._slots = named_slots(
            param_table(self.runner.models[POLICY].part.whole, self.runner.models[POLICY].part)
        )
        self.updates = StagedUpdates(self.runner.models[POLICY], self._slots)

    def forward(self, message: Forward) -> None:
        """Run the forward of a step."""
        batches, copies = self._steps.forward(message)
        self._result = self.runner.forward(
            batches, copies, self._drawn[-1] if self._drawn else None
        )

    def draw(self, message: Draw) -> Samples | None:
        """Run the draw of a step.

        Return the samples if rank 0 is in another stage and this is the reporting rank of the last
        stage.
        """
        batch = self._steps.draw(message)
        if not self.place.is_last_stage:
            return None
        drawn = self.runner.sample(self._result, batch)
        # the next step needs no tokens from here: sequences in flight are not scheduled
        if self.place.mesh.pipeline > 1:
            return to_message(drawn.wait()) if self.place == self.place.teller else None
        self._drawn.append(drawn)
        if len(self._drawn) > 1:  # the next step may need the tokens of the newest draw
            self._drawn.popleft().wait()
        return None

    @property
    def times(self) -> tuple[int, int]:
        """Nanoseconds busy in steps, and waiting in steps for another stage."""
        return self.runner.rank_times()[0]

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Run a call of rank 0 by its name."""
        return getattr(self, f"_on_{name}")(**arguments)

    def close(self) -> None:
        """Release all resources."""
        for asleep in self._asleep.values():
            asleep.forget()
        for group in self._groups:
            group.close()

    # -- calls -------------------------------------------------------------------------------------

    def _on_drop(self, weight_set: str) -> None:
        if weight_set in self.runner.models:
            self.runner.drop(weight_set)

    def _on_set_aside(self, weight_set: str, name: str, update: int) -> None:
        self.runner.set_aside(weight_set, name, self.updates.params_of(update))

    def _on_sleep(self, memory: Any) -> None:
        if memory not in self._asleep:
            self._asleep[memory] = self.runner.give_back(memory)

    def _on_wake(self, memory: Any) -> None:
        if memory in self._asleep:
            self._asleep[memory].end()
            del self._asleep[memory]

    def _on_block_shape(self) -> list[int]:
        return list(self.runner.storage.block_shape)

    def _on_read_blocks(self, block_ids: list[int]) -> bytes:
        return self.runner.storage.read_blocks(block_ids).numpy().tobytes()

    def _on_write_blocks(self, block_ids: list[int], data: bytes) -> None:
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(block_ids), -1)
        self.runner.storage.write_blocks(block_ids, whole)

    def _on_add_matrices(self, **matrices: Any) -> None:
        self._adapters.add(**matrices)

    def _on_make_adapter(self, number: int, name: str, version: int) -> None:
        self._adapters.make(number, name, version)

    def _on_settle(self, update: int) -> None:
        self.updates.settle(update)

    def _on_apply(self, update: int) -> None:
        self.updates.apply(update)

    def _on_discard(self, update: int) -> None:
        self.updates.discard(update)

    @torch.no_grad()
    def _on_read(self, name: str, start: int) -> bytes:
        """Return some bytes of this rank's part of a checkpoint tensor from offset `start` on.

        Return no bytes if the rank holds none of the tensor.
        """
        slot = self._slots.get(name)
        if slot is None:
            return b""
        values = read(self.runner.models[POLICY].params, slot).detach().cpu().contiguous()
        return values.view(-1).view(torch.uint8)[start : start + PIECE_BYTES].numpy().tobytes()
