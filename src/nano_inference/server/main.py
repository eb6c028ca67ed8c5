"""`serve` runs the server until it is stopped, `running_server` during a `with` block."""

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
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from nano_inference.checkpoints.folders import gguf_of, weight_bytes
from nano_inference.checkpoints.shard_checks import require_shardable
from nano_inference.config import EngineConfig, with_plain_weights
from nano_inference.errors import ConfigError, EngineDead, ModelLoadError, NanoInferenceError
from nano_inference.features import SERVER_LIMITS, SEVERAL, Setting, require
from nano_inference.fleet.fleet_client import FleetClient
from nano_inference.remote.client import EngineClient
from nano_inference.remote.in_process import InProcessClient
from nano_inference.remote.log_lines import set_up_logs
from nano_inference.remote.process_client import ProcessClient
from nano_inference.server.api.anthropic import answer as anthropic
from nano_inference.server.api.ollama import answer as ollama
from nano_inference.server.api.openai import chat_answer as openai_chat
from nano_inference.server.api.openai import completions_answer as openai_completions
from nano_inference.server.api.openai import responses_answer as openai_responses
from nano_inference.server.api.shared.protocol import ApiProtocol
from nano_inference.server.app import Routes, build_app
from nano_inference.server.config import ServerConfig
from nano_inference.server.door import Door
from nano_inference.server.hosted import ModelSource
from nano_inference.server.model_routes import model_routes
from nano_inference.server.ollama_routes import ollama_routes
from nano_inference.server.page.routes import page_routes
from nano_inference.server.response_routes import response_routes
from nano_inference.server.routes import (
    embedding_routes,
    fleet_routes,
    server_routes,
    token_routes,
)
from nano_inference.server.runner import Runner
from nano_inference.server.server import Server
from nano_inference.server.sessions.routes import session_routes
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

_GLANCE = 0.02  # seconds between checks if the engine is built

PROTOCOLS: dict[str, ApiProtocol] = {
    "/v1/completions": openai_completions.PROTOCOL,
    "/v1/chat/completions": openai_chat.PROTOCOL,
    "/v1/messages": anthropic.PROTOCOL,
    "/v1/responses": openai_responses.PROTOCOL,
    "/api/chat": ollama.CHAT_PROTOCOL,
    "/api/generate": ollama.GENERATE_PROTOCOL,
}
ROUTES: Sequence[Routes] = (
    page_routes,
    server_routes,
    model_routes,
    token_routes,
    embedding_routes,
    response_routes,
    fleet_routes,
    session_routes,
    ollama_routes,
)
# Additional protocols with `ServerConfig.rl`.
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


# Engine to build, several of which some are loaded at a time, or a client that is not started yet.
Engines = EngineConfig | Sequence[EngineConfig] | EngineClient


def serve(engine: Engines, config: ServerConfig, door: Door | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C, then wait for running requests. Sets up logging.

    Args:
        engine: Engine to build, several that are loaded on demand, or a client that is not started
            yet.
        config: Configuration of the server.
        door: Sockets that listen already. None: the server listens once its modules are imported.

    Raises:
        NanoInferenceError: The engine could not be built, or it died (`EngineDead`).
    """
    set_up_logs(config.log_level, config.log_format)
    server = Server(config, sources_of(engine, config))
    runner = _runner(server)
    sockets = [] if door is None else door.hand_over()
    runner.run(sockets or None)
    raise_if_lost(server)


def raise_if_lost(server: Server) -> None:
    """Raise the error by which a server lost its engine, if it did."""
    if isinstance(server.lost, Exception):
        raise server.lost
    if server.lost is not None:
        raise EngineDead(server.lost)


@contextmanager
def running_server(
    engine: Engines,
    config: ServerConfig | None = None,
    *,
    timeout: float = 300.0,
) -> Iterator[str]:
    """Run a server on a thread of this process and yield its URL. For tests, notebooks and
    examples.

    Args:
        engine: Engine to build, several that are loaded on demand, or a client that is not started
            yet.
        config: Configuration of the server. None: a free port of this machine, and the engine in
            this process.
        timeout: Maximum seconds to build the engine.

    Raises:
        NanoInferenceError: The engine could not be built.
    """
    config = config if config is not None else ServerConfig(port=0, in_process=True)
    server = Server(config, sources_of(engine, config))
    runner = _runner(server)
    thread = threading.Thread(target=runner.run, name="nano-inference server", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + timeout
        while not (runner.started and server.lifecycle.is_ready):
            if not thread.is_alive() or server.lost is not None or time.monotonic() > deadline:
                raise_if_lost(server)
                raise NanoInferenceError("the server did not start; see its log.")
            time.sleep(0.01)
        yield runner.url
    finally:
        runner.should_exit = True
        thread.join()


def sources_of(engine: Engines, config: ServerConfig) -> list[ModelSource]:
    """Return the models of a server, none of which is loaded yet.

    Raises:
        ConfigError: Two models have the same name, or an option is for a single model.
    """
    if isinstance(engine, EngineClient):
        return [ModelSource(config.served_names, lambda: engine)]
    engines = [engine] if isinstance(engine, EngineConfig) else [*engine]
    several = len(engines) > 1
    for one in engines:
        require(SERVER_LIMITS, Setting(config, one, **{SEVERAL: several or None}))
    names = _names(engines, config)
    return [
        ModelSource(
            names[number],
            partial(engine_client, each, config, number),
            each.model_path,
            needs(each),
        )
        for number, each in enumerate(engines)
    ]


def _names(engines: Sequence[EngineConfig], config: ServerConfig) -> list[tuple[str, ...]]:
    """Return the names of each model: for several models, one of `served_model_name` each."""
    if len(engines) == 1:
        return [config.served_names]
    paths = [each.model_path for each in engines]
    names = config.served_names or tuple(paths)
    if len(names) != len(paths):
        raise ConfigError(
            f"served_model_name has {len(names)} names for {len(paths)} models; give one for each "
            "model, in the same order."
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"two models are named {twice[0]!r}; give each its own served_model_name."
        )
    return [(name,) for name in names]


def needs(engine: EngineConfig) -> int | None:
    """Return the bytes of this machine's memory that an engine needs at least: its weights, and its
    KV cache if its size is configured. None: unknown, or it may run on a GPU.
    """
    if not engine.device.startswith("cpu") and (engine.device != "auto" or GPUS.exists()):
        return None
    size = weight_bytes(engine.model_path)
    return None if size is None else size + (engine.kv_cache_memory or 0)


GPUS = Path("/dev/nvidiactl")


def engine_client(engine: EngineConfig, config: ServerConfig, number: int = 0) -> EngineClient:
    """Return a client of an engine that is not started yet, in this or its own process. `number` is
    the model's among several. Raises `ConfigError`.
    """
    require_shardable(engine)
    engine = _for_a_trainer(engine) if config.rl else engine
    meeting = _meeting(engine, config)
    make = _maker(engine, config, meeting)
    if config.replicas == 1 and not config.restart_engine:
        return make(number)
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
    """Return the config with plain weights, unless it names a quantization. Log it for `.gguf`
    files.
    """
    if engine.quantization == "auto":
        with suppress(ModelLoadError):  # building the engine reports it
            if gguf_of(engine.model_path) is not None:
                log.info("--rl serves plain weights, because trainers' updates need them.")
    return with_plain_weights(engine)


def _maker(
    engine: EngineConfig, config: ServerConfig, meeting: str
) -> Callable[[int], EngineClient]:
    """Return a function that makes a client of engine `number`. Several engines divide this
    machine's cores, unless `num_threads` is configured.

    Args:
        engine: Configuration of each engine.
        config: Configuration of the server.
        meeting: Folder from `_meeting`.
    """
    if engine.num_threads is None and config.replicas > 1:
        engine = replace(engine, num_threads=max(1, usable_cores() // config.replicas))
    made = itertools.count()

    def make(number: int) -> EngineClient:
        if config.in_process:
            return InProcessClient(engine, config.max_backlog)
        # Engines in lockstep are made together. Each later set of engines needs a new rendezvous.
        rendezvous = f"{meeting}/{next(made) // config.replicas}" if meeting else ""
        return ProcessClient(
            engine,
            config.max_backlog,
            log_format=config.log_format,
            number=number,
            meeting=rendezvous,
        )

    return make


@asynccontextmanager
async def running_app(engine: EngineConfig, config: ServerConfig) -> AsyncIterator[ASGIApp]:
    """Yield the server's application around a built engine, without a port. Raises
    `NanoInferenceError` if the engine cannot be built.
    """
    server = Server(config, sources_of(engine, config))
    app = build_app(server, PROTOCOLS, (embedding_routes,))
    async with server.running():
        while not server.lifecycle.is_ready:
            raise_if_lost(server)
            await asyncio.sleep(_GLANCE)
        yield app


def _meeting(engine: EngineConfig, config: ServerConfig) -> str:
    """Return the rendezvous folder of engines in lockstep. Empty: there are none."""
    if engine.expert_parallel == 1 or engine.tensor_parallel > 1:
        return ""
    if config.replicas != engine.expert_parallel:
        raise ConfigError(
            f"expert_parallel={engine.expert_parallel} with tensor_parallel=1 needs one replica "
            f"per expert rank: set replicas={engine.expert_parallel}, not {config.replicas}."
        )
    require(SERVER_LIMITS, Setting(config, lockstep=True))
    folder = tempfile.mkdtemp(prefix="nano-inference-lockstep-")  # mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _runner(server: Server) -> Runner:
    rl = server.config.rl
    protocols = PROTOCOLS | RL_PROTOCOLS if rl else PROTOCOLS
    return Runner(build_app(server, protocols, (*ROUTES, *RL_ROUTES) if rl else ROUTES), server)
