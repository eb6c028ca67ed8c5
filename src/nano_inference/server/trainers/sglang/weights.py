"""SGLang's weight updates."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from nano_inference.remote.operations import Checks, Received
from nano_inference.server.control.control import Control
from nano_inference.server.control.engine import OpenUpdate
from nano_inference.server.control.requests.sglang import (
    BeginUpdate,
    CheckWeights,
    JoinGroup,
    LeaveGroup,
    UpdateFields,
    UpdateFromDisk,
    UpdateFromGroup,
    UpdateFromTensor,
)
from nano_inference.server.errors import ApiError, bad_request

DIALECT = "SGLang"
WHOLE = 1 << 62  # bytes of a packed run that never ends: a flattened bucket is one broadcast
_DIGITS = 16  # of a tensor's checksum: SGLang's have 64 bits
_RANK: Mapping[str, object] = {
    **dict.fromkeys(("rank", "tp_rank", "dp_rank", "pp_rank"), 0),
    **dict.fromkeys(("size", "tp_size", "dp_size", "pp_size"), 1),
}


class Weights:
    """Which requests belong to one weight update, although not every trainer says so.

    Miles says where an update begins and ends. slime and AReaL pause, send their weights in as many
    requests as they have buckets, and continue: between the two, requests are gathered into one
    update, which takes effect as a whole. Outside of a pause each request is an update of its own,
    and so is one that says that it is whole.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._turn = asyncio.Lock()

    @property
    def _gathered(self) -> OpenUpdate | None:
        """The update that requests of this dialect have opened."""
        update = self._control.updates.open
        return update if update is not None and update.dialect == DIALECT else None

    # -- groups ------------------------------------------------------------------------------------

    async def join(self, given: JoinGroup) -> dict[str, object]:
        """`/init_weights_update_group`."""
        name = given.group_name
        await self._control.groups.join(
            name,
            given.master_address.strip("[]"),  # AReaL writes IPv6 as in a URL
            given.master_port,
            rank=given.rank_offset,
            world_size=given.world_size,
            backend=given.backend,
            named=True,
            timeout=given.timeout,
        )
        # A living trainer's update would have kept it out: what is gathered is of one that is gone.
        await self.cancel("another trainer has come.")
        return done(f"the group {name} has formed.")

    async def leave(self, given: LeaveGroup) -> dict[str, object]:
        """`/destroy_weights_update_group`."""
        name = given.group_name
        await self.cancel(f"the group {name} was destroyed.")
        await self._control.groups.leave(name)
        return done(f"the group {name} is no more.")

    # -- updates -----------------------------------------------------------------------------------

    async def begin(self, given: BeginUpdate) -> dict[str, object]:
        """`/begin_weight_update`: from now on requests are gathered, until `end`."""
        async with self._turn:
            await self._control.updates.begin(dialect=DIALECT, **given.checks)
        return done("a weight update is open.")

    async def update_from_distributed(self, given: UpdateFromGroup) -> dict[str, object]:
        """`/update_weights_from_distributed`."""
        packed_bytes = WHOLE if given.load_format == "flattened_bucket" else None
        return await self._take(
            given,
            lambda: self._control.updates.receive_broadcast(
                given.group_name,
                given.tensors(),
                packed_bytes=packed_bytes,
                timeout=given.timeout,
            ),
        )

    async def update_from_tensor(
        self, given: UpdateFromTensor, content: bytes | bytearray
    ) -> dict[str, object]:
        """`/update_weights_from_tensor`."""
        return await self._take(given, lambda: self._control.updates.receive_file(content))

    async def update_from_disk(self, given: UpdateFromDisk) -> dict[str, object]:
        """`/update_weights_from_disk`."""

        def receive() -> Awaitable[Received]:
            return self._control.updates.receive_folder(given.model_path, timeout=given.timeout)

        told = await self._take(given, receive, whole=True)
        return told | {"num_paused_requests": 0}

    async def _take(
        self,
        given: UpdateFields,
        receive: Callable[[], Awaitable[Received]],
        *,
        whole: bool = False,
    ) -> dict[str, object]:
        """Take a request's weights, with `receive`, into the open update or a new one. `whole`:
        they are all of the update, unless `begin` was called. A failure ends the update.
        """
        control = self._control
        version, checks, flushes = given.weight_version, given.checks, given.flush_cache
        if given.abort_all_requests:
            await control.pauses.abort(None)
        async with self._turn:
            try:
                update = self._gathered or await control.updates.begin(
                    dialect=DIALECT, is_explicit=False, **checks
                )
                _require_same_checks(update.checks, checks)
                update.version = update.version if version is None else version
                received = await receive()
            except BaseException as problem:
                await self.fail(problem)
                raise
            if update.is_explicit or (received.paused and not (whole or flushes)):
                return done("the weights are kept until the update is complete.")
            name = await control.updates.finish()
        if flushes:
            await control.memory.flush_cache()
        return done(f"the weights serve as version {name}.")

    async def end(self, _: object) -> dict[str, object]:
        """`/end_weight_update`: what was gathered takes effect."""
        async with self._turn:
            if self._gathered is None:
                raise ApiError(409, "no weight update is open; call /begin_weight_update first.")
            name = await self._control.updates.finish()
        return done(f"the weights serve as version {name}.")

    async def commit(self) -> None:
        """What was gathered without a `begin` takes effect."""
        async with self._turn:
            if self._gathered is not None and not self._gathered.is_explicit:
                await self._control.updates.finish()

    async def cancel(self, reason: str) -> None:
        """Forget what was gathered, and what is still coming."""
        if self._gathered is not None:
            await self._control.updates.cancel(reason)

    async def fail(self, problem: BaseException) -> None:
        """A request of the update was refused: what it had to bring is missing, so what was
        gathered is forgotten.
        """
        if self._gathered is not None:
            await self._control.updates.fail(problem)

    # -- checks ------------------------------------------------------------------------------------

    async def check(self, given: CheckWeights, *, commits: bool = True) -> dict[str, Any]:
        """`/weights_checker`. What was gathered takes effect first, with `commits`: not by a
        GET.
        """
        action, skipped = given.action, given.skip_tensor_list
        if commits:
            await self.commit()
        if action == "snapshot":
            await self._control.checksums.remember()
        elif action == "compare":
            _require_same(_without(await self._control.checksums.changed_tensors(), skipped))
        else:
            checksums = await self._control.checksums.get()
            kept = {name: checksums[name][:_DIGITS] for name in _without(checksums, skipped)}
            return {"success": True, "message": "Success.", **_ranks(kept)}
        return {"success": True, "message": "Success."}


def done(message: str) -> dict[str, object]:
    """The answer to what was done."""
    return {"success": True, "message": message}


def _require_same_checks(began: Checks, said: Checks) -> None:
    for name, value in said.items():
        if began.get(name) != value:
            text = (
                f"{name}={value} comes too late: this update began with "
                f"{began.get(name)}; say it at first."
            )
            raise bad_request(text, name)


def _without(names: Iterable[str], skipped: Sequence[str]) -> list[str]:
    return [name for name in names if not any(part in name for part in skipped)]


def _require_same(changed: Sequence[str]) -> None:
    if changed:
        shown_names = ", ".join(changed[:3]) + (" …" if len(changed) > 3 else "")
        raise bad_request(f"{len(changed)} tensor(s) are not those of the snapshot: {shown_names}.")


def _ranks(checksums: Mapping[str, str]) -> dict[str, Any]:
    """One rank has all of them."""
    own = hashlib.sha256()
    for name, each in sorted(checksums.items()):
        own.update(name.encode() + each.encode())
    rank = {"checksums": checksums, "per_gpu_checksum": own.hexdigest(), "parallelism_info": _RANK}
    return {
        "ranks": [rank],
        "per_engine_checksum": hashlib.sha256(own.hexdigest().encode()).hexdigest(),
    }
