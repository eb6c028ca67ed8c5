"""`Hosted`: a model's engine from the start of its load to its end, with the server's state about
it, and the requests that use it.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from nano_inference.checkpoints.generation_defaults import AUTO, as_text
from nano_inference.remote.client import EngineClient
from nano_inference.server.api.openai.kept_responses import KeptResponses
from nano_inference.server.api.openai.responses_reasoning import Seal
from nano_inference.server.api.parsing import chat_format
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.control import Control
from nano_inference.server.http.admission import Admission, Readiness
from nano_inference.text.tokenizer import load_tokenizer

log = logging.getLogger("nano_inference.server")


# concurrent `embed` calls: the engine runs few calls at a time, and has others to serve
EMBEDS_AT_ONCE = 8


@dataclass(frozen=True)
class ModelSource:
    """A model that the server may load.

    Attributes:
        names: Names that clients use. Answers contain the first. Empty: the engine's `model_path`.
        make: Makes the client of a new engine that is not started yet.
        path: Path of the model. Empty: unknown.
        needs: Bytes of this machine's memory that a load takes at least. None: only the engine
            knows.
    """

    names: tuple[str, ...]
    make: Callable[[], EngineClient]
    path: str = ""
    needs: int | None = None


class Lease:
    """Use of a hosted model by one request. The model stays loaded until `release`.

    Attributes:
        hosted: The model.
        waited: Seconds that the request waited for it.
        keep_alive: Seconds for which the idle model stays loaded from then on. None: as before.
    """

    def __init__(self, hosted: "Hosted", waited: float = 0.0) -> None:
        self.hosted = hosted
        self.waited = waited
        self.keep_alive: float | None = None
        hosted.leases.add(self)
        hosted.used()

    def release(self) -> None:
        """End the use. The second call has no effect."""
        if self in self.hosted.leases:
            self.hosted.leases.remove(self)
            if self.keep_alive is not None:
                self.hosted.idle_seconds = self.keep_alive
            self.hosted.used()


class Hosted:
    """One engine of a model. It is started once and closed once.

    Args:
        source: The model.
        config: Configuration of the server.
        responses: Store of responses, which outlives the engine.
        on_use: Called whenever the use of the engine begins or ends.

    Attributes:
        client, lifecycle, control, admission: The engine, its state, the operations of trainers on
            it, and the limit of its queue.
        served: The served model. None: the engine is not ready yet.
        leases: Requests that use it.
        idle_seconds: Seconds for which it stays loaded without requests.
        embeds: Held by each call of `embed`.
        is_leaving: True while it is being unloaded. New requests wait for the next engine.
    """

    def __init__(
        self,
        source: ModelSource,
        config: ServerConfig,
        responses: KeptResponses,
        on_use: Callable[["Hosted"], None] = lambda _: None,
    ) -> None:
        self.source, self.config = source, config
        self.client = source.make()
        self.lifecycle = Readiness(self.client, config.restart_engine)
        self.control = Control(self.client, config)
        self.admission = Admission(config, self.client, lambda: self.control.engine.names.newest)
        self.served: Served | None = None
        self.leases: set[Lease] = set()
        self.idle_seconds = math.inf if config.idle_unload is None else config.idle_unload
        self.is_leaving = False
        self.embeds = asyncio.Semaphore(EMBEDS_AT_ONCE)
        self._responses = responses
        self._on_use = on_use
        self._is_closed = False
        self._free = asyncio.Event()

    @property
    def can_serve(self) -> bool:
        """True if a request can use it now."""
        alive = self.lifecycle.is_ready and not self.is_leaving and not self._is_closed
        return alive and self.client.why_dead is None

    async def start(self) -> None:
        """Build the engine. Raises the error that prevented it."""
        await self.client.start()
        self.served = await asyncio.to_thread(
            serve_what, self.source.names, self.config, self.client, self.control, self._responses
        )
        self.lifecycle.is_ready = True
        log_ready(self.config, self.served)

    async def close(self) -> None:
        """End the engine."""
        self._is_closed = True
        self.is_leaving = True
        await self.client.close()

    @property
    def is_closed(self) -> bool:
        """True if the engine has ended, or is ending."""
        return self._is_closed

    def used(self) -> None:
        """Note that a use has begun or ended."""
        if self.leases:
            self._free.clear()
        else:
            self._free.set()
        self._on_use(self)

    async def unused(self) -> None:
        """Wait until no request uses it."""
        if self.leases:
            await self._free.wait()


def serve_what(
    names: tuple[str, ...],
    config: ServerConfig,
    client: EngineClient,
    control: Control,
    responses: KeptResponses,
) -> Served:
    """Return the state that request builders need, once the engine is ready."""
    info = client.info
    # without a tokenizer only token ids are served
    folder = info.tokenizer_folder
    tokenizer = None if folder is None else load_tokenizer(Path(folder))
    if tokenizer is not None and config.chat_template is not None:
        tokenizer = replace(tokenizer, chat_template=config.chat_template, tool_template=None)
    templates = [] if tokenizer is None else [tokenizer.chat_template, tokenizer.tool_template]
    template = "\n".join(each for each in templates if each is not None) or None
    return Served(
        name=(*names, info.model_path)[0],
        engine=info,
        tokenizer=tokenizer,
        chat_format=chat_format(template, config.tool_format, config.reasoning_format),
        config=config,
        other_names=names[1:],
        version_name=lambda version: control.engine.names.name(version),
        version_number=lambda name: control.engine.names.number(name),
        adapters=control.adapters.loaded,
        responses=responses,
        seal=Seal(config.reasoning_key),
    )


def log_ready(config: ServerConfig, served: Served) -> None:
    """Log that the engine is ready, with its main limits."""
    info = served.engine
    log.info(
        "serving %s (%s)%s: max_model_len=%d, max_batch_size=%d, max_queued_samples=%d, "
        "request_timeout=%g s.",
        served.name,
        info.numerics,
        "; without a tokenizer, it accepts only token ids, by /v1/completions"
        if served.tokenizer is None
        else "",
        info.max_model_len,
        info.max_batch_size,
        config.max_queued_samples,
        config.request_timeout,
    )
    if _calls_are_unknown(config, served):
        log.info(
            "the chat template does not show this model's format of tool calls: hermes is assumed; "
            "set another one with --tool-format."
        )
    if served.sampling_defaults:
        log.info(
            "default sampling parameters from %s: %s; disable them with --generation-config none.",
            "the model" if config.generation_config == AUTO else config.generation_config,
            as_text(served.sampling_defaults),
        )


def _calls_are_unknown(config: ServerConfig, served: Served) -> bool:
    format, tokenizer = served.chat_format, served.tokenizer
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    unknown = format.tools is None and not format.in_channels
    return has_template and unknown and config.tool_format is None
