"""SGLang's weight updates."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from fastapi import Request

from nano_inference.remote.operations import Checks, Received
from nano_inference.server.control import Control, OpenUpdate
from nano_inference.server.errors import ApiError, bad_request, shown
from nano_inference.server.server import Server, read_request
from nano_inference.server.trainers.base64_bodies import decoded, read_with_file
from nano_inference.server.trainers.reading import (
    Fields,
    checks_of,
    tensors_of,
)

DIALECT = "SGLang"
GROUP = "weight_update_group"  # where a trainer gives it no name
MOST_NAME = 256  # characters
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
        update = self._control.update
        return update if update is not None and update.dialect == DIALECT else None

    # -- groups ------------------------------------------------------------------------------------

    async def join(self, fields: Fields) -> str:
        """`/init_weights_update_group`."""
        host = fields.required_text("master_address").strip("[]")  # AReaL writes IPv6 as in a URL
        port = fields.required_number("master_port", least=1, most=65535)
        world_size = fields.required_number("world_size", least=2, most=2**16)
        rank = fields.required_number("rank_offset", least=1, most=world_size - 1)
        backend = fields.text("backend")
        if backend not in (None, "gloo", "nccl"):
            raise bad_request(f"backend must be gloo or nccl, not {shown(backend)}.", "backend")
        name = _group(fields)
        await self._control.join_group(
            name,
            host,
            port,
            rank=rank,
            world_size=world_size,
            backend=backend,
            named=True,
            timeout=fields.seconds("timeout"),
        )
        # A living trainer's update would have kept it out: what is gathered is of one that is gone.
        await self.cancel("another trainer has come.")
        return f"the group {name} has formed."

    async def leave(self, fields: Fields) -> str:
        """`/destroy_weights_update_group`."""
        name = _group(fields)
        await self.cancel(f"the group {name} was destroyed.")
        await self._control.leave_group(name)
        return f"the group {name} is no more."

    # -- updates -----------------------------------------------------------------------------------

    async def begin(self, fields: Fields) -> str:
        """`/begin_weight_update`: from now on requests are gathered, until `end`."""
        fields.word("selector", ("target", "all"), "all")
        async with self._turn:
            await self._control.begin_update(dialect=DIALECT, **checks_of(fields))
        return "a weight update is open."

    async def update_from_distributed(self, fields: Fields) -> str:
        """`/update_weights_from_distributed`."""
        tensors, group, timeout = (
            tensors_of(fields, "dtypes"),
            _group(fields),
            fields.seconds("timeout"),
        )
        packed_bytes = (
            WHOLE if _load_format(fields, ("flattened_bucket",)) == "flattened_bucket" else None
        )

        return await self._take(
            fields,
            lambda: self._control.receive_broadcast(
                group, tensors, packed_bytes=packed_bytes, timeout=timeout
            ),
        )

    async def update_from_tensor(self, request: Request, server: Server) -> str:
        """`/update_weights_from_tensor`."""
        fields, content = await tensors_and_fields(request, server, "serialized_named_tensors")
        return await self._take(fields, lambda: self._control.receive_file(content))

    async def update_from_disk(self, fields: Fields) -> str:
        """`/update_weights_from_disk`. It is a whole update: slime deletes the folder while the
        engine is paused.
        """
        path, timeout = fields.required_text("model_path"), fields.seconds("timeout")
        _load_format(fields, ("safetensors",))
        if fields.value("manifest") is not None:
            raise ApiError(501, "manifest is not supported; leave it out.", "manifest")

        return await self._take(
            fields, lambda: self._control.receive_folder(path, timeout=timeout), whole=True
        )

    async def _take(
        self,
        fields: Fields,
        receive: Callable[[], Awaitable[Received]],
        *,
        whole: bool = False,
    ) -> str:
        """Take a request's weights, with `receive`, into the open update or a new one. `whole`:
        they are all of the update, unless `begin` was called. A failure ends the update.
        """
        control = self._control
        fields.word("selector", ("target", "all"), "all")  # there is no draft model
        flushes = fields.flag("flush_cache", default=False)  # says: the last of several
        version, checks = fields.version("weight_version"), checks_of(fields)
        if fields.flag("abort_all_requests", default=False):
            await control.abort(None)
        async with self._turn:
            try:
                update = self._gathered or await control.begin_update(
                    dialect=DIALECT, is_explicit=False, **checks
                )
                _require_same_checks(update.checks, checks)
                update.version = update.version if version is None else version
                received = await receive()
            except BaseException as problem:
                await self.fail(problem)
                raise
            if update.is_explicit or (received.paused and not (whole or flushes)):
                return "the weights are kept until the update is complete."
            name = await control.finish_update()
        if flushes:
            await control.flush_cache()
        return f"the weights serve as version {name}."

    async def end(self) -> str:
        """`/end_weight_update`: what was gathered takes effect."""
        async with self._turn:
            if self._gathered is None:
                raise ApiError(409, "no weight update is open; call /begin_weight_update first.")
            return f"the weights serve as version {await self._control.finish_update()}."

    async def commit(self) -> None:
        """What was gathered without a `begin` takes effect."""
        async with self._turn:
            if self._gathered is not None and not self._gathered.is_explicit:
                await self._control.finish_update()

    async def cancel(self, reason: str) -> None:
        """Forget what was gathered, and what is still coming."""
        if self._gathered is not None:
            await self._control.cancel_update(reason)

    async def fail(self, problem: BaseException) -> None:
        """A request of the update was refused: what it had to bring is missing, so what was
        gathered is forgotten.
        """
        if self._gathered is not None:
            await self._control.fail_update(problem)

    # -- checks ------------------------------------------------------------------------------------

    async def check(self, fields: Fields, *, commits: bool = True) -> dict[str, Any]:
        """`/weights_checker`. What was gathered takes effect first, with `commits`: not by a
        GET.
        """
        action = fields.word(
            "action", ("checksum", "snapshot", "compare", "reset_tensors"), "checksum"
        )
        if action == "reset_tensors":
            raise ApiError(
                501,
                "action=reset_tensors, which would overwrite the weights, is not supported.",
                "action",
            )
        fields.word("selector", ("target", "all"), "all")
        fields.flag("allow_quant_error", default=False)  # nothing is quantized
        skipped = fields.texts("skip_tensor_list") or ()
        if commits:
            await self.commit()
        if action == "snapshot":
            await self._control.remember_checksums()
        elif action == "compare":
            _require_same(_without(await self._control.changed_tensors(), skipped))
        else:
            checksums = await self._control.checksums()
            kept = {name: checksums[name][:_DIGITS] for name in _without(checksums, skipped)}
            return {"success": True, "message": "Success.", **_ranks(kept)}
        return {"success": True, "message": "Success."}


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


def _group(fields: Fields) -> str:
    name = fields.text("group_name") or GROUP
    if len(name) > MOST_NAME:
        raise bad_request(
            f"group_name must have at most {MOST_NAME} characters, not {len(name)}.", "group_name"
        )
    return name


def _load_format(fields: Fields, known: Sequence[str]) -> str | None:
    given = fields.text("load_format")
    if given in (None, "auto", *known):
        return given
    what = f"leave it out, or say {' or '.join(known)}"
    hint = (
        "; flattened buckets come pickled, and pickles are not read"
        if given == "flattened_bucket"
        else ""
    )
    raise bad_request(f"load_format={shown(given)} is not supported: {what}{hint}.", "load_format")


async def tensors_and_fields(
    request: Request, server: Server, *names: str
) -> tuple[Fields, bytes | bytearray]:
    """What a request says, and the safetensors file that it brings: as the body, beside what the
    query says, or as base64 in the first of these fields that is there.
    """
    server.lifecycle.require_open()
    query = {name: request.query_params.getlist(name) for name in request.query_params}
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type == "application/octet-stream":
        content = await read_request(request, server, lambda body, _: body)
        fields = Fields({}, query)
        _load_format(fields, ("safetensors",))
        return fields, content
    body, file = await read_request(
        request, server, lambda body, _: read_with_file(body, server.config, names)
    )
    fields = Fields(body, query)
    _load_format(fields, ("safetensors",))
    if file is not None:
        return fields, file
    name = next((each for each in names if fields.value(each) is not None), names[0])
    given = fields.texts(name)
    if given is None or len(given) != 1:
        raise bad_request(
            f"{name} must hold one string, a safetensors file as base64; or send the file itself "
            "as the body, as application/octet-stream.",
            name,
        )
    return fields, decoded(given[0], name)  # of the query, which is short
