"""Weight updates in SGLang's dialect."""

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
    UpdateFromIpc,
    UpdateFromTensor,
)
from nano_inference.server.errors import ApiError, bad_request
from nano_inference.server.trainers.handles import offers_of_json, offers_of_sglang
from nano_inference.server.trainers.reading import only_file
from nano_inference.system.pickles import FIRST_BYTE

DIALECT = "SGLang"
WHOLE = 1 << 62  # a packed run that never ends: a flattened bucket is one broadcast
TENSORS = "serialized_named_tensors"
_DIGITS = 16  # hexadecimal digits of a checksum: SGLang's have 64 bits
_RANK: Mapping[str, object] = {
    **dict.fromkeys(("rank", "tp_rank", "dp_rank", "pp_rank"), 0),
    **dict.fromkeys(("size", "tp_size", "dp_size", "pp_size"), 1),
}


class Weights:
    """Grouping of requests into weight updates, since not every trainer marks them.

    Miles marks the beginning and the end of an update. slime and AReaL pause, send one request per
    bucket, and continue. Requests during the pause are collected into one update, which takes
    effect as a whole. Outside of a pause each request is its own update, and so is a request that
    is marked as whole.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._turn = asyncio.Lock()

    @property
    def _gathered(self) -> OpenUpdate | None:
        """Open update of this dialect."""
        update = self._control.updates.open
        return update if update is not None and update.dialect == DIALECT else None

    # -- groups ------------------------------------------------------------------------------------

    async def join(self, fields: JoinGroup) -> dict[str, object]:
        """Answer `POST /init_weights_update_group`."""
        name = fields.group_name
        await self._control.groups.join(
            name,
            fields.master_address.strip("[]"),  # AReaL writes IPv6 addresses in brackets
            fields.master_port,
            rank=fields.rank_offset,
            world_size=fields.world_size,
            backend=fields.backend,
            named=True,
            timeout=fields.timeout,
        )
        # A live trainer's update would have made `join` fail, so this one's trainer is gone.
        await self.cancel("another trainer has joined.")
        return done(f"the group {name} has formed.")

    async def leave(self, fields: LeaveGroup) -> dict[str, object]:
        """Answer `POST /destroy_weights_update_group`."""
        name = fields.group_name
        await self.cancel(f"the group {name} was destroyed.")
        await self._control.groups.leave(name)
        return done(f"the group {name} was destroyed.")

    # -- updates -----------------------------------------------------------------------------------

    async def begin(self, fields: BeginUpdate) -> dict[str, object]:
        """Answer `POST /begin_weight_update`: collect requests until `end`."""
        async with self._turn:
            await self._control.updates.begin(dialect=DIALECT, **fields.checks)
        return done("a weight update is open.")

    async def update_from_distributed(self, fields: UpdateFromGroup) -> dict[str, object]:
        """Answer `POST /update_weights_from_distributed`."""
        packed_bytes = WHOLE if fields.load_format == "flattened_bucket" else None
        return await self._take(
            fields,
            lambda: self._control.updates.receive_broadcast(
                fields.group_name,
                fields.tensors(),
                packed_bytes=packed_bytes,
                timeout=fields.timeout,
            ),
        )

    async def update_from_tensor(
        self, fields: UpdateFromTensor, contents: Sequence[bytes | bytearray]
    ) -> dict[str, object]:
        """Answer `POST /update_weights_from_tensor`."""
        updates = self._control.updates
        if fields.may_lend and all(each[:1] == FIRST_BYTE for each in contents):
            _require_entries(len(contents), self._control.engine.client.num_engines)
            offers = offers_of_sglang(contents, fields.is_flattened, TENSORS)
            return await self._take(fields, lambda: updates.receive_lent(offers))
        if fields.is_flattened:
            raise bad_request(
                "load_format=flattened_bucket requires SGLang's pickle of a CUDA tensor.", TENSORS
            )
        content = only_file(contents, TENSORS)
        return await self._take(fields, lambda: updates.receive_file(content))

    async def update_from_ipc(self, fields: UpdateFromIpc) -> dict[str, object]:
        """Answer `POST /update_weights_from_ipc`."""
        offers = offers_of_json(fields.offers, "offers")
        return await self._take(fields, lambda: self._control.updates.receive_lent(offers))

    async def update_from_disk(self, fields: UpdateFromDisk) -> dict[str, object]:
        """Answer `POST /update_weights_from_disk`."""

        def receive() -> Awaitable[Received]:
            return self._control.updates.receive_folder(fields.model_path, timeout=fields.timeout)

        reply = await self._take(fields, receive, whole=True)
        return reply | {"num_paused_requests": 0}

    async def _take(
        self,
        fields: UpdateFields,
        receive: Callable[[], Awaitable[Received]],
        *,
        whole: bool = False,
    ) -> dict[str, object]:
        """Receive a request's weights into the open update, or into a new one. With `whole` they
        are the complete update, unless `begin` was called. An error cancels the update.
        """
        control = self._control
        version, checks, flushes = fields.weight_version, fields.checks, fields.flush_cache
        if fields.abort_all_requests:
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
                return done("the weights are staged until the update is complete.")
            name = await control.updates.finish()
        if flushes:
            await control.memory.flush_cache()
        return done(f"the weights are served as version {name}.")

    async def end(self, _: object) -> dict[str, object]:
        """Answer `POST /end_weight_update`: apply the collected weights."""
        async with self._turn:
            if self._gathered is None:
                raise ApiError(409, "no weight update is open; call /begin_weight_update first.")
            name = await self._control.updates.finish()
        return done(f"the weights are served as version {name}.")

    async def commit(self) -> None:
        """Apply the weights collected without a `begin`."""
        async with self._turn:
            if self._gathered is not None and not self._gathered.is_explicit:
                await self._control.updates.finish()

    async def cancel(self, reason: str) -> None:
        """Cancel the open update, including calls in progress."""
        if self._gathered is not None:
            await self._control.updates.cancel(reason)

    async def fail(self, problem: BaseException) -> None:
        """Cancel the open update because one of its requests failed, so that its weights are
        missing.
        """
        if self._gathered is not None:
            await self._control.updates.fail(problem)

    # -- checks ------------------------------------------------------------------------------------

    async def check(self, fields: CheckWeights, *, commits: bool = True) -> dict[str, Any]:
        """Answer `/weights_checker`. With `commits` (not for a GET), collected weights are
        applied first.
        """
        action, skipped = fields.action, fields.skip_tensor_list
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
    """Return a success reply."""
    return {"success": True, "message": message}


def _require_entries(count: int, num_engines: int) -> None:
    if count not in (1, num_engines):
        raise bad_request(
            f"{TENSORS} has {count} entries, one for each rank of a larger engine; send one, or "
            f"one for each of the {num_engines} engines.",
            TENSORS,
        )


def _require_same_checks(began: Checks, said: Checks) -> None:
    for name, value in said.items():
        if began.get(name) != value:
            text = (
                f"{name}={value} differs from {began.get(name)}, with which this update began; "
                "set it in the first request."
            )
            raise bad_request(text, name)


def _without(names: Iterable[str], skipped: Sequence[str]) -> list[str]:
    return [name for name in names if not any(part in name for part in skipped)]


def _require_same(changed: Sequence[str]) -> None:
    if changed:
        shown_names = ", ".join(changed[:3]) + (" …" if len(changed) > 3 else "")
        raise bad_request(f"{len(changed)} tensor(s) differ from the snapshot: {shown_names}.")


def _ranks(checksums: Mapping[str, str]) -> dict[str, Any]:
    """Return checksums in SGLang's format, as those of a single rank."""
    digest = hashlib.sha256()
    for name, checksum in sorted(checksums.items()):
        digest.update(name.encode() + checksum.encode())
    rank = {
        "checksums": checksums,
        "per_gpu_checksum": digest.hexdigest(),
        "parallelism_info": _RANK,
    }
    return {
        "ranks": [rank],
        "per_engine_checksum": hashlib.sha256(digest.hexdigest().encode()).hexdigest(),
    }
