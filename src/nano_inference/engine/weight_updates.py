"""Updates of the policy's weights: blocking or not, and what becomes of running requests.

- `recompute`: they compute their context again under the new weights.
- `keep`: they go on with the keys and values that they have.
- `abort`: they end with what they have.
- `wait`: the update waits for them; newcomers wait for the update.
- `finish_old`: they finish on the old weights, which `ModelRunner.set_aside` keeps as `previous`.
"""

import math
from collections.abc import Callable
from typing import Any, Unpack, get_args

import torch

from nano_inference.core.gate import Gate
from nano_inference.core.loop import EngineLoop, UpdateQueued, UpdatesGivenUp
from nano_inference.core.sequence import POLICY, PREVIOUS
from nano_inference.core.updates import policy_of
from nano_inference.device.memory_profile import DeviceMemory
from nano_inference.device.runner import ModelRunner
from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.errors import InvalidRequest, WeightUpdateConflict, WeightUpdateError
from nano_inference.features import UPDATE_LIMITS, Setting, require
from nano_inference.models.decoder import Decoder
from nano_inference.system.locks import FairLock
from nano_inference.types import KvPolicy, UpdateOptions
from nano_inference.weights.sync import WeightSyncManager
from nano_inference.weights.update import WeightUpdate


def manager_of(
    model: Decoder,
    runner: ModelRunner,
    gate: Gate,
    lock: FairLock,
    workspace: int,
    shared: Callable[[], SharedLoop],
) -> WeightSyncManager:
    """Make the manager of an engine's weights.

    Args:
        model: the policy.
        runner: has the model.
        gate: what other engines decide.
        lock: of the loop.
        workspace: bytes of the device that a step needs.
        shared: the loop that updates are announced to; it may be made later.
    """
    return WeightSyncManager(
        model,
        announce=lambda update: shared().post(UpdateQueued(update)),
        room=lambda: staging_room(model.device, workspace),
        shares=runner.shares,
        with_others=None if gate.alone else (lock, gate.allows),
        asleep=lambda: not shared().life.has_weights,
        given_up=lambda: shared().post(UpdatesGivenUp()),
        set_aside=lambda update: runner.set_aside_for(update),
    )


class Updates:
    """Updates of the policy. `manager` checks and writes them, the loop says when."""

    def __init__(self, manager: WeightSyncManager, shared: SharedLoop) -> None:
        self.manager, self._shared = manager, shared

    def update(
        self, weights: Any, blocking: bool, **options: Unpack[UpdateOptions]
    ) -> WeightUpdate:
        """See `InferenceEngine.update_weights`."""
        shared, loop = self._shared, self._shared.loop
        shared.require_alive()
        policy = self.policy(options, "recompute" if blocking else "keep")
        # not held: another thread is stepping and will apply it
        held = shared.lock.acquire(blocking=blocking)
        try:
            # Once every sequence has ended, a step may still be in flight: no later step would
            # retire it.
            idle = not loop.in_flight or not loop.sequences.by_id
            at_once = held and (blocking or idle)
            if at_once:
                shared.handle()
            if blocking:
                self._require_possible(policy)
            # Tensors that are written now need not be copied. While an update waits, their owner or
            # a trainer that writes to their file may change them, after they were checked.
            borrowed = at_once and loop.gate.alone and not loop.would_wait(policy)
            update = self.manager.stage(weights, copy=not borrowed, **options)
            if at_once:
                shared.handle()
            # another thread's request or update may have come in between
            if borrowed:
                self.manager.keep(update)
        finally:
            if held:
                shared.lock.release()
        if blocking:
            self._wait_for(update, policy)
        return update

    def _wait_for(self, update: WeightUpdate, policy: KvPolicy) -> None:
        while not update.done():
            self._require_no_stall(update, policy)
            if not self._shared.advance_or_wait():
                update.wait(0.01)  # for engines in lockstep that do not have it yet
        update.result(0)

    def policy(self, options: UpdateOptions, default: KvPolicy) -> KvPolicy:
        """What becomes of running requests; from now on the options say it. Raises
        `WeightUpdateError`.
        """
        given = options.get("kv_policy")
        policy = default if given is None else given
        require_policy(self._shared.loop, policy)
        options["kv_policy"] = policy
        return policy

    def checksum(self) -> dict[str, str]:
        """See `InferenceEngine.weights_checksum`."""
        self._shared.require_alive()
        with self._shared.lock:
            if not self._shared.life.has_weights:
                raise WeightUpdateConflict("the weights are asleep; call wake() first.")
            return self.manager.checksum()

    def weight_set_of(self, version: int) -> str:
        """Which weights have this version. Raises `InvalidRequest`."""
        loop = self._shared.loop
        versions = loop.sequences.versions
        for weight_set in (POLICY, PREVIOUS):
            if versions.get(weight_set) == version:
                if weight_set == POLICY and any(
                    policy_of(update) == "wait" for update in self.manager.pending.arrived()
                ):
                    raise InvalidRequest(
                        f"weight version {version!r} is about to go: an update waits for the "
                        "requests that run, and "
                        "newcomers for the update."
                    )
                return weight_set
        raise InvalidRequest(
            f"weight version {version!r} is gone; this engine serves {versions[POLICY]}."
        )

    def _require_possible(self, policy: KvPolicy, own: int | None = None) -> None:
        """Raise `WeightUpdateError` where a thread that waits would keep itself from ever going on.
        With the lock, and the messages taken in: what waits in the queue now is before the update,
        or is that itself, of version `own`.
        """
        loop = self._shared.loop
        if not self._shared.is_paused_by_me() or not loop.would_wait(policy):
            return
        what = "requests that are paused" if loop.life.has_weights else "weights that are asleep"
        arrived = self.manager.pending.arrived() if loop.life.has_weights else []
        if arrived and arrived[0].version != own:
            first = arrived[0]
            what = (
                f"weight version {first.version} with kv_policy={policy_of(first)!r}, and that "
                f"one for {what}"
            )
        raise WeightUpdateError(
            f"a blocking update with kv_policy={policy!r} would wait for {what}, by this thread; "
            "resume() or wake() "
            "first."
        )

    def _require_no_stall(self, update: WeightUpdate, policy: KvPolicy) -> None:
        """As `_require_possible`, while it waits: another thread's update may have come before it,
        and a receiver of a step's tokens may have paused the engine. The update is withdrawn
        then.
        """
        with self._shared.lock:
            self._shared.handle()
            try:
                if not update.done():
                    self._require_possible(policy, update.version)
            except WeightUpdateError as problem:
                if self.manager.withdraw(update, problem):  # else it came in time after all
                    raise


def staging_room(device: torch.device, workspace: int, memory: DeviceMemory | None = None) -> float:
    """Bytes of a device that a weight update may be put aside in; a step's workspace is left to the
    steps.
    """
    if device.type == "cpu":
        return math.inf
    reading = (memory or DeviceMemory(device)).read()
    # what is under way takes some too
    return max(0, (reading.total - reading.used - workspace) // 2)


def require_policy(loop: EngineLoop, kv_policy: KvPolicy) -> None:
    """Raise `WeightUpdateError` for what is not possible here."""
    if kv_policy not in get_args(KvPolicy):
        raise WeightUpdateError(
            f"kv_policy={kv_policy!r} is not one of {', '.join(get_args(KvPolicy))}."
        )
    asked = Setting(kv_policy=kv_policy, lockstep=not loop.gate.alone)
    require(UPDATE_LIMITS, asked)
