"""`Engine`: the engine as trainers' operations reach it, and what the server knows of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nano_inference.errors import NanoInferenceError
from nano_inference.remote.client import EngineClient
from nano_inference.remote.operations import Checks
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.versions import VersionNames
from nano_inference.server.errors import ApiError, api_error_of, bad_request
from nano_inference.types import AdapterInfo, KvPolicy

SOON = 60.0  # seconds of operations that wait for a step at most
SILENT = "engine_silent"


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
    """What is known of one engine; the next one in its place has none of it.

    Attributes:
        num_restarts: of engines before it.
        names: of its versions; None: no request has needed one yet.
        update: that is open.
        folder: from which the weights that serve came.
        checksums: that a request asked to remember.
        pause_policy: what the pause asked for, for updates that say nothing; None: there is none,
            or it did not say.
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
        """What is known of the engine that serves now, or that is about to serve."""
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
