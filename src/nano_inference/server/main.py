"""`serve` runs the server until it is told to stop; `running_server` runs one for the length of a
`with` block.
"""

import asyncio
import atexit
import itertools
import logging
import math
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

from starlette.types import ASGIApp

from nano_inference.checkpoints.folders import gguf_of
from nano_inference.checkpoints.shard_checks import require_shardable
from nano_inference.config import EngineConfig, with_plain_weights
from nano_inference.errors import ConfigError, EngineDead, ModelLoadError, NanoInferenceError
from nano_inference.features import SERVER_LIMITS, Setting, require
from nano_inference.fleet.fleet_client import FleetClient
from nano_inference.remote.client import EngineClient
from nano_inference.remote.in_process import InProcessClient
from nano_inference.remote.log_lines import set_up_logs
from nano_inference.remote.process_client import ProcessClient
from nano_inference.server.api.anthropic import answer as anthropic
from nano_inference.server.api.openai import chat_answer as openai_chat
from nano_inference.server.api.openai import completions_answer as openai_completions
from nano_inference.server.api.openai import responses_answer as openai_responses
from nano_inference.server.api.shared.protocol import ApiProtocol
from nano_inference.server.app import Routes, build_app
from nano_inference.server.config import ServerConfig
from nano_inference.server.page.routes import page_routes
from nano_inference.server.routes import (
    embedding_routes,
    fleet_routes,
    model_routes,
    response_routes,
    server_routes,
)
from nano_inference.server.runner import Runner
from nano_inference.server.server import Server
from nano_inference.server.trainers import (
    pipeline_rl,
    prime_rl,
    shared,
)
from nano_inference.server.trainers.sglang import answer as sglang_generate
from nano_inference.server.trainers.sglang import routes as sglang_routes
from nano_inference.server.trainers.vllm import answer as vllm_generate
from nano_inference.server.trainers.vllm import routes as vllm_routes
from nano_inference.system.machine import usable_cores

log = logging.getLogger("nano_inference.server")

_GLANCE = 0.02  # seconds between two looks at whether the engine is built

PROTOCOLS: dict[str, ApiProtocol] = {
    "/v1/completions": openai_completions.PROTOCOL,
    "/v1/chat/completions": openai_chat.PROTOCOL,
    "/v1/messages": anthropic.PROTOCOL,
    "/v1/responses": openai_responses.PROTOCOL,
}
ROUTES: Sequence[Routes] = (
    page_routes,
    server_routes,
    model_routes,
    embedding_routes,
    response_routes,
    fleet_routes,
)
# With `ServerConfig.rl`.
RL_PROTOCOLS: dict[str, ApiProtocol] = {
    "/generate": sglang_generate.PROTOCOL,
    "/inference/v1/generate": vllm_generate.PROTOCOL,
}
RL_ROUTES: Sequence[Routes] = (
    shared.routes,
    vllm_routes.routes,
    sglang_routes.routes,
    prime_rl.routes,
    pipeline_rl.routes,
)


def serve(engine: EngineConfig | EngineClient, config: ServerConfig) -> None:
    """Serve until SIGTERM or Ctrl-C, which let running requests end first. Sets up logging.

    Args:
        engine: what to build, or a client of one that is not started yet.
        config: how.

    Raises:
        NanoInferenceError: the engine could not be built, or it has died (`EngineDead`).
    """
    set_up_logs(config.log_level, config.log_format)
    server = Server(config, _client(engine, config))
    _runner(server).run()
    raise_if_lost(server)


def raise_if_lost(server: Server) -> None:
    """If a server has ended because it lost its engine, raise why."""
    if isinstance(server.lost, Exception):
        raise server.lost
    if server.lost is not None:
        raise EngineDead(server.lost)


@contextmanager
def running_server(
    engine: EngineConfig | EngineClient,
    config: ServerConfig | None = None,
    *,
    timeout: float = 300.0,
) -> Iterator[str]:
    """A server on a thread of this process; yields its URL. For tests, notebooks and examples.

    Args:
        engine: what to build, or a client of one that is not started yet.
        config: by default a free port of this machine, and the engine in this process.
        timeout: seconds that the engine may take to be built.

    Raises:
        NanoInferenceError: it could not be built.
    """
    config = config if config is not None else ServerConfig(port=0, in_process=True)
    server = Server(config, _client(engine, config))
    runner = _runner(server)
    thread = threading.Thread(target=runner.run, name="nano-inference server", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + timeout
        while not (runner.started and server.lifecycle.is_ready):
            if not thread.is_alive() or server.lost is not None or time.monotonic() > deadline:
                raise_if_lost(server)
                raise NanoInferenceError("the server did not start; its log says why.")
            time.sleep(0.01)
        yield runner.url
    finally:
        runner.should_exit = True
        thread.join()


def engine_client(engine: EngineConfig, config: ServerConfig) -> EngineClient:
    """A client of an engine that is not started yet, in this process or in one of its own. Raises
    `ConfigError`.
    """
    require_shardable(engine)
    engine = _for_a_trainer(engine) if config.rl else engine
    meeting = _meeting(engine, config)
    make = _maker(engine, config, meeting)
    if config.replicas == 1 and not config.restart_engine:
        return make(0)
    return FleetClient(
        make,
        config.replicas,
        config.max_backlog,
        restart=config.restart_engine,
        stall_timeout=config.stall_timeout if config.replicas > 1 else math.inf,
        seed=engine.seed,
        prefill_replicas=config.prefill_replicas,
        share_prefixes=config.share_prefixes,
        in_lockstep=bool(meeting),
        managed=config.replicas > 1,
    )


def _for_a_trainer(engine: EngineConfig) -> EngineConfig:
    """The config with plain weights, unless it names codes; of a `.gguf` file that is said."""
    if engine.quantization == "auto":
        with suppress(ModelLoadError):  # building the engine says why
            if gguf_of(engine.model_path) is not None:
                log.info("--rl serves plain weights, as a trainer's updates need them.")
    return with_plain_weights(engine)


def _maker(
    engine: EngineConfig, config: ServerConfig, meeting: str
) -> Callable[[int], EngineClient]:
    """Makes a client of the engine of a number. Several engines share this machine's cores, unless
    the engine's configuration says how many.

    Args:
        engine: of each.
        config: of the server.
        meeting: see `_meeting`.
    """
    if engine.num_threads is None and config.replicas > 1:
        engine = replace(engine, num_threads=max(1, usable_cores() // config.replicas))
    made = itertools.count()

    def make(number: int) -> EngineClient:
        if config.in_process:
            return InProcessClient(engine, config.max_backlog)
        # Engines in lockstep are made all at once; those that are made after these have died meet
        # elsewhere.
        own = f"{meeting}/{next(made) // config.replicas}" if meeting else ""
        return ProcessClient(
            engine, config.max_backlog, log_format=config.log_format, number=number, meeting=own
        )

    return make


@asynccontextmanager
async def running_app(engine: EngineConfig, config: ServerConfig) -> AsyncIterator[ASGIApp]:
    """Yield the server's application around an engine that is built, without a port. Raises
    `NanoInferenceError` where it cannot be built.
    """
    server = Server(config, engine_client(engine, config))
    app = build_app(server, PROTOCOLS, (embedding_routes,))
    async with server.running():
        while not server.lifecycle.is_ready:
            raise_if_lost(server)
            await asyncio.sleep(_GLANCE)
        yield app


def _meeting(engine: EngineConfig, config: ServerConfig) -> str:
    """The folder in which engines in lockstep meet; empty: they are not."""
    if engine.expert_parallel == 1 or engine.tensor_parallel > 1:
        return ""
    if config.replicas != engine.expert_parallel:
        raise ConfigError(
            f"expert_parallel={engine.expert_parallel} with tensor_parallel=1 is as many engines "
            "in lockstep: "
            f"replicas={engine.expert_parallel}, not {config.replicas}."
        )
    require(SERVER_LIMITS, Setting(config, lockstep=True))
    folder = tempfile.mkdtemp(prefix="nano-inference-lockstep-")  # mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _client(engine: EngineConfig | EngineClient, config: ServerConfig) -> EngineClient:
    return engine if isinstance(engine, EngineClient) else engine_client(engine, config)


def _runner(server: Server) -> Runner:
    rl = server.config.rl
    protocols = PROTOCOLS | RL_PROTOCOLS if rl else PROTOCOLS
    return Runner(build_app(server, protocols, (*ROUTES, *RL_ROUTES) if rl else ROUTES), server)
