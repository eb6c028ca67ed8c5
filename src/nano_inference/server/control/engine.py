"""`Engine`: calls the engine for trainers' operations, and holds what the server remembers of it:
names of versions (a rising integer in the engine, any string on the wire), the open update,
adapters.
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
    """Names of versions, chosen before an update begins, so that the first token of it already has
    one.

    Args:
        newest: the engine's version that serves, or the newest that it was told of.
    """

    def __init__(self, newest: int = 0) -> None:
        self._newest = newest
        self._names: dict[int, str] = {}  # of those that are not called by their number

    def name(self, version: int) -> str:
        """Return the trainer's name of a version, without waiting: replies hold it."""
        return self._names.get(version, str(version))

    def number(self, name: str) -> int | None:
        """Return the newest version of this name, which an update may still be making. A number
        that was not given as a name stands for itself. None: there is no such version.
        """
        for version, each in reversed(self._names.items()):
            if each == name:
                return version
        number = _own_number(name)
        return number if number is not None and number not in self._names else None

    def choose(self, name: str | None) -> int:
        """Return the integer of the next version: the name itself if it is a larger number than all
        before. Raises `ApiError`.
        """
        own = None if name is None else _own_number(checked_name(name))
        self._newest = own if own is not None and own > self._newest else self._newest + 1
        if name is not None:
            self.rename(self._newest, name)
        return self._newest

    def give_back(self, version: int, before: int) -> None:
        """Forget a chosen version that was not made; `before` is the newest version without it."""
        self._names.pop(version, None)
        if self._newest == version:
            self._newest = before

    def see(self, version: int) -> None:
        """Note a version that exists, by whatever update."""
        self._newest = max(self._newest, version)

    @property
    def newest(self) -> int:
        """The newest version that exists, or that an update is making."""
        return self._newest

    def rename(self, version: int, name: str) -> None:
        """Call a version something else from now on. Raises `ApiError`."""
        if checked_name(name) == str(version):
            self._names.pop(version, None)
        else:
            self._names[version] = name


def checked_name(name: str, field: str = "weight_version") -> str:
    """A name that a version may have, as a field of a request says it. Raises `ApiError`."""
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
    """A weight update that is open, as far as requests have told of it. Its tensors are with the
    engine, which knows it by its number.

    Attributes:
        number: of the session.
        checks: that it began with.
        dialect: whose routes opened it; empty: any.
        is_explicit: a request said where it begins, and one will say where it ends.
        version: what the new version will be called; None: by its number.
        folder: from which it has taken weights.
    """

    number: int
    checks: Checks
    dialect: str = ""
    is_explicit: bool = True
    version: str | None = None
    folder: str | None = None


@dataclass
class Known:
    """Facts about one engine. The next engine in its place begins without them.

    Attributes:
        num_restarts: of engines before it.
        names: of its versions; None: no request has needed one yet.
        update: that is open.
        folder: from which the weights that serve came.
        checksums: that a request asked to remember.
        pause_policy: the `kv_policy` that the pause asked for, used by updates that name none;
            None: there is no pause, or it asked for none.
        adapters: by name; None: those that it started with.
    """

    num_restarts: int
    names: VersionNames | None = None
    update: OpenUpdate | None = None
    folder: str | None = None
    checksums: dict[str, str] | None = None
    pause_policy: KvPolicy | None = None
    adapters: Mapping[str, AdapterInfo] | None = None


class Engine:
    """The engine that serves.

    Args:
        client: of it.
        config: whose deadlines hold.
    """

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.client, self.config = client, config
        self._known = Known(client.num_restarts)

    @property
    def known(self) -> Known:
        """Facts about the engine that serves, or that is about to serve."""
        if self._known.num_restarts != self.client.num_restarts:
            self._known = Known(self.client.num_restarts)
        return self._known

    @property
    def names(self) -> VersionNames:
        """The names of its versions. Raises `EngineDead` before it is ready."""
        known = self.known
        if known.names is None:
            known.names = VersionNames(self.client.info.weight_version)
        return known.names

    @property
    def model_path(self) -> str:
        """Where the weights that serve were read: SGLang tells the folder of an update."""
        return self.known.folder or self.client.info.model_path

    async def call(self, name: str, seconds: float = SOON, /, **arguments: Any) -> Any:
        """As `EngineClient.call`. Raises `ApiError`."""
        try:
            return await self.client.call(name, timeout=seconds, **arguments)
        except TimeoutError:
            text = f"the engine did not answer within {seconds:g} s."
            raise ApiError(504, text, code=SILENT) from None
        except NanoInferenceError as problem:
            raise api_error_of(problem) from problem

    async def serving_version(self) -> str:
        """The name of the version that serves."""
        return self.names.name(await self.call("get_weight_version"))

    def seconds(self, timeout: float | None) -> float:
        """A deadline as it was asked for, or the server's. Raises `ApiError`."""
        seconds = self.config.rl_timeout if timeout is None else timeout
        if not 0 < seconds < float("inf"):
            raise bad_request(
                f"timeout={seconds!r} must be a positive number of seconds.", "timeout"
            )
        return seconds
