"""`Engine`: calls the engine for trainers, and holds the server's state about it: version names
(integers in the engine, any string on the wire), the open update, adapters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nano_inference.errors import NanoInferenceError
from nano_inference.remote.client import EngineClient
from nano_inference.remote.operations import Checks
from nano_inference.remote.time_limits import SOON
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError, api_error_of, bad_request, shown
from nano_inference.types import AdapterInfo, KvPolicy

SILENT = "engine_silent"
MAX_NAME = 256  # characters
MAX_DIGITS = 15


class VersionNames:
    """Names of weight versions. A name is chosen before its update is applied, so that even the
    first token has it.

    Args:
        newest: The newest known weight version of the engine.
    """

    def __init__(self, newest: int = 0) -> None:
        self._newest = newest
        self._names: dict[int, str] = {}  # only versions whose name is not their number

    def name(self, version: int) -> str:
        """Return the trainer's name of a version. Does not wait, since replies contain it."""
        return self._names.get(version, str(version))

    def number(self, name: str) -> int | None:
        """Return the newest version with this name, which an open update may still be making. A
        number that was not given as a name is that version. None: there is no such version.
        """
        for version, version_name in reversed(self._names.items()):
            if version_name == name:
                return version
        number = _own_number(name)
        return number if number is not None and number not in self._names else None

    def choose(self, name: str | None) -> int:
        """Return the integer of the next version: the name itself if it is a larger number than all
        before. Raises `ApiError`.
        """
        numeric = None if name is None else _own_number(checked_name(name))
        self._newest = (
            numeric if numeric is not None and numeric > self._newest else self._newest + 1
        )
        if name is not None:
            self.rename(self._newest, name)
        return self._newest

    def give_back(self, version: int, before: int) -> None:
        """Discard a chosen version whose update failed. `before` is the newest version without
        it.
        """
        self._names.pop(version, None)
        if self._newest == version:
            self._newest = before

    def see(self, version: int) -> None:
        """Record an existing version."""
        self._newest = max(self._newest, version)

    @property
    def newest(self) -> int:
        """Newest version that exists, or that an update is making."""
        return self._newest

    def rename(self, version: int, name: str) -> None:
        """Rename a version. Raises `ApiError`."""
        if checked_name(name) == str(version):
            self._names.pop(version, None)
        else:
            self._names[version] = name


def checked_name(name: str, field: str = "weight_version") -> str:
    """Return a valid name of a version, from the request's field `field`. Raises `ApiError`."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise bad_request(
            f"{field} must be a printable string of 1 to {MAX_NAME} characters, not {shown(name)}.",
            field,
        )
    return name


def _own_number(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdigit() and len(name) <= MAX_DIGITS else None


@dataclass
class OpenUpdate:
    """Server's state of the open weight update. Its tensors are in the engine, which knows it by
    its number.

    Attributes:
        number: Number of the session.
        checks: Checks chosen at its beginning.
        dialect: Dialect whose routes opened it. Empty: any.
        is_explicit: True if requests mark its beginning and end.
        version: Name of the new version. None: its number.
        folder: Folder from which weights were read.
    """

    number: int
    checks: Checks
    dialect: str = ""
    is_explicit: bool = True
    version: str | None = None
    folder: str | None = None


@dataclass
class Known:
    """State of one engine. A replacement engine begins with new state.

    Attributes:
        num_restarts: Number of engines before it.
        names: Names of its versions. None: no request has needed one yet.
        update: Open update.
        folder: Folder of the served weights.
        checksums: Stored checksums.
        pause_policy: `kv_policy` of the current pause, the default of its updates. None: there is
            no pause, or it named none.
        adapters: Adapters by name. None: those loaded at the engine's start.
    """

    num_restarts: int
    names: VersionNames | None = None
    update: OpenUpdate | None = None
    folder: str | None = None
    checksums: dict[str, str] | None = None
    pause_policy: KvPolicy | None = None
    adapters: Mapping[str, AdapterInfo] | None = None


class Engine:
    """Access to the engine for trainers' operations.

    Args:
        client: Client of the engine.
        config: Configuration of the server, with the deadlines.
    """

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.client, self.config = client, config
        self._known = Known(client.num_restarts)

    @property
    def known(self) -> Known:
        """State of the current engine."""
        if self._known.num_restarts != self.client.num_restarts:
            self._known = Known(self.client.num_restarts)
        return self._known

    @property
    def names(self) -> VersionNames:
        """Names of the engine's versions. Raises `EngineDead` before it is ready."""
        known = self.known
        if known.names is None:
            known.names = VersionNames(self.client.info.weight_version)
        return known.names

    @property
    def model_path(self) -> str:
        """Path of the served weights. SGLang reports the folder of the last update here."""
        return self.known.folder or self.client.info.model_path

    async def call(self, name: str, seconds: float = SOON, /, **arguments: Any) -> Any:
        """Run an engine operation (`EngineClient.call`). Raises `ApiError`."""
        try:
            return await self.client.call(name, timeout=seconds, **arguments)
        except TimeoutError:
            text = f"the engine did not answer within {seconds:g} s."
            raise ApiError(504, text, code=SILENT) from None
        except NanoInferenceError as problem:
            raise api_error_of(problem) from problem

    async def serving_version(self) -> str:
        """Return the name of the served version."""
        return self.names.name(await self.call("get_weight_version"))

    def seconds(self, timeout: float | None) -> float:
        """Return the requested deadline, or the server's. Raises `ApiError`."""
        seconds = self.config.rl_timeout if timeout is None else timeout
        if not 0 < seconds < float("inf"):
            raise bad_request(
                f"timeout={seconds!r} must be a positive number of seconds.", "timeout"
            )
        return seconds
