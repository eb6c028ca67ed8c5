"""Updates of the policy's weights, blocking or not, and their effect on running requests.

- `recompute`: recompute their context under the new weights.
- `keep`: continue with the keys and values computed so far.
- `abort`: end them with the tokens sampled so far.
- `wait`: delay the update until they finish, and new requests until the update.
- `finish_old`: finish them on the old weights, which `ModelRunner.set_aside` keeps as `previous`.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack, get_args

from nano_inference.arrays import Device
from nano_inference.core.gate import Gate
from nano_inference.core.loop import EngineLoop, UpdateQueued, UpdatesGivenUp
from nano_inference.core.sequence import POLICY, PREVIOUS
from nano_inference.core.updates import policy_of
from nano_inference.device.runner import ModelRunner
from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.errors import InvalidRequest, WeightUpdateConflict, WeightUpdateError
from nano_inference.features import UPDATE_LIMITS, Setting, require
from nano_inference.models.decoder import Decoder
from nano_inference.system.locks import FairLock
from nano_inference.types import KvPolicy, UpdateOptions
from nano_inference.weights.sync import WeightSyncManager
from nano_inference.weights.update import WeightUpdate

if TYPE_CHECKING:  # needs torch
    from nano_inference.device.memory_profile import DeviceMemory


def manager_of(
    model: Decoder,
    runner: ModelRunner,
    gate: Gate,
    lock: FairLock,
    workspace: int,
    shared: Callable[[], SharedLoop],
) -> WeightSyncManager:
    """Return the manager of an engine's weights.

    Args:
        model: Policy model.
        runner: Runner of the model.
        gate: Gate that decides together with other engines.
        lock: Lock of the loop.
        workspace: Bytes of device memory that a step needs.
        shared: Function that returns the loop to announce updates to. The loop may be created
            later.
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
    """Updates of the policy. `manager` checks and writes them. The loop decides when."""

    def __init__(self, manager: WeightSyncManager, shared: SharedLoop) -> None:
        self.manager, self._shared = manager, shared

    def update(
        self, weights: Any, blocking: bool, **options: Unpack[UpdateOptions]
    ) -> WeightUpdate:
        """Update the weights as `InferenceEngine.update_weights` documents."""
        shared, loop = self._shared, self._shared.loop
        shared.require_alive()
        policy = self.policy(options, "recompute" if blocking else "keep")
        # if not held, another thread is stepping and will apply the update
        held = shared.lock.acquire(blocking=blocking)
        try:
            # After every sequence has ended, a step may still be in flight that no later step
            # would retire.
            idle = not loop.in_flight or not loop.sequences.by_id
            at_once = held and (blocking or idle)
            if at_once:
                shared.handle()
            if blocking:
                self._require_possible(policy)
            # Tensors that are written now need no copy. If the update waits, their owner may change
            # them, or the file they are mapped from, after they were checked.
            borrowed = at_once and loop.gate.alone and not loop.would_wait(policy)
            update = self.manager.stage(weights, copy=not borrowed, **options)
            if at_once:
                shared.handle()
            # a request or an update of another thread may have arrived in between
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
                update.wait(0.01)  # engines in lockstep may not have it yet
        update.result(0)

    def policy(self, options: UpdateOptions, default: KvPolicy) -> KvPolicy:
        """Return the effect on running requests, and set it in `options`. Raises
        `WeightUpdateError`.
        """
        requested = options.get("kv_policy")
        policy = default if requested is None else requested
        require_policy(self._shared.loop, policy)
        options["kv_policy"] = policy
        return policy

    def checksum(self) -> dict[str, str]:
        """Return the checksums that `InferenceEngine.weights_checksum` documents."""
        self._shared.require_alive()
        with self._shared.lock:
            if not self._shared.life.has_weights:
                raise WeightUpdateConflict("the weights are asleep; call wake() first.")
            return self.manager.checksum()

    def weight_set_of(self, version: int) -> str:
        """Return the weight set that has this version. Raises `InvalidRequest`."""
        loop = self._shared.loop
        versions = loop.sequences.versions
        for weight_set in (POLICY, PREVIOUS):
            if versions.get(weight_set) == version:
                if weight_set == POLICY and any(
                    policy_of(update) == "wait" for update in self.manager.pending.arrived()
                ):
                    raise InvalidRequest(
                        f"weight version {version!r} is being replaced: an update waits for "
                        "running requests, and new requests wait for that update; resume without "
                        "a version."
                    )
                return weight_set
        raise InvalidRequest(
            f"weight version {version!r} is not live; this engine serves version "
            f"{versions[POLICY]}."
        )

    def _require_possible(self, policy: KvPolicy, version: int | None = None) -> None:
        """Raise `WeightUpdateError` if the calling thread would wait for itself.

        Call it with the lock and all messages processed. Updates in the queue then precede the
        caller's update, or are that update, with number `version`.
        """
        loop = self._shared.loop
        if not self._shared.is_paused_by_me() or not loop.would_wait(policy):
            return
        what = "paused requests" if loop.life.has_weights else "weights that are asleep"
        arrived = self.manager.pending.arrived() if loop.life.has_weights else []
        if arrived and arrived[0].version != version:
            first = arrived[0]
            what = (
                f"weight version {first.version} with kv_policy={policy_of(first)!r}, which waits "
                f"for {what}"
            )
        raise WeightUpdateError(
            f"a blocking update with kv_policy={policy!r} would wait for {what}, stopped by this "
            "thread; call resume() or wake() first."
        )

    def _require_no_stall(self, update: WeightUpdate, policy: KvPolicy) -> None:
        """Check `_require_possible` while the update waits, and withdraw the update if it fails.

        Another thread's update may have arrived first, or a sink may have paused the engine.
        """
        with self._shared.lock:
            self._shared.handle()
            try:
                if not update.done():
                    self._require_possible(policy, update.version)
            except WeightUpdateError as problem:
                if self.manager.withdraw(update, problem):  # otherwise it was already applied
                    raise


def staging_room(device: Device, workspace: int, memory: "DeviceMemory | None" = None) -> float:
    """Return the bytes of device memory in which an update may be staged. A step's workspace is
    reserved.
    """
    if device.type == "cpu":
        return math.inf
    from nano_inference.device.memory_profile import DeviceMemory

    reading = (memory or DeviceMemory(device)).read()
    # half, since tensors in transit need memory too
    return max(0, (reading.total - reading.used - workspace) // 2)


def require_policy(loop: EngineLoop, kv_policy: KvPolicy) -> None:
    """Raise `WeightUpdateError` for a policy that is not possible here."""
    if kv_policy not in get_args(KvPolicy):
        raise WeightUpdateError(
            f"kv_policy={kv_policy!r} must be one of {', '.join(get_args(KvPolicy))}."
        )
    setting = Setting(kv_policy=kv_policy, lockstep=not loop.gate.alone)
    require(UPDATE_LIMITS, setting)
