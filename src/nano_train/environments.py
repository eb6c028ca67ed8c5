"""Environments of verifiers: they own the questions, conversations and rewards of a run.

An environment samples from the run's own engine, which a server on a free port of this machine
serves (`turns.py`). Seeds follow from run, step, question and sample, so that the order and number
of rollouts that play at once change no bits.
"""

import asyncio
import hashlib
import importlib
import json
import logging
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.errors import ConfigError, one_line
from nano_train.config import EnvironmentTable
from nano_train.records import RunError
from nano_train.turns import Rollout, RolloutClient, joined

RELEASE = "0.4"  # the interface changes with each release
MODEL = "policy"
PATIENCE = 60.0  # seconds to open and to close

log = logging.getLogger("nano_train")


class RolloutFailed(RunError):
    """Rollout of an environment that failed, took too long, or cannot be trained on."""


class Play(NamedTuple):
    """A rollout to play: task of the environment, sampling parameters, and its name in errors."""

    task: Any
    params: SamplingParams
    where: str


class Played(NamedTuple):
    """A rollout that has ended: all its turns as one sample, and its reward."""

    sample: TrainingSample
    reward: float


@dataclass(frozen=True)
class Environment:
    """An environment that is loaded.

    Attributes:
        table: Its table in run.toml.
        loaded: `verifiers.v1.Env`.
        tasks: Its tasks, in order.
    """

    table: EnvironmentTable
    loaded: Any
    tasks: Sequence[Any]

    def opened(self, engine: InferenceEngine, stop: Sequence[str] = ()) -> "Arena":
        """Return the environment at work. Close it."""
        return Arena(self, engine, stop)


def verifiers() -> Any:
    """Return the module `verifiers.v1`. Raises `ConfigError` for a missing or other release."""
    try:
        release = importlib.import_module("verifiers").__version__
        if release.split(".")[:2] == RELEASE.split("."):
            return importlib.import_module("verifiers.v1")
        problem = f"not {release}"
    except ImportError as missing:
        problem = f"which cannot be imported here ({one_line(missing)})"
    raise ConfigError(
        f"task.environment needs verifiers {RELEASE}, {problem}; run: pip install "
        "'nano-inference[environments]'."
    )


def load_environment(table: EnvironmentTable, most: int) -> Environment:
    """Load an environment with all its tasks, or the first `most` of an infinite one.

    Raises `ConfigError` if it cannot be loaded, or leaves no task to train on.
    """
    vf = verifiers()
    try:
        loaded = vf.load_environment(vf.resolve_env_config(_settings(vf, table)))
        taskset = loaded.taskset
        tasks = list(islice(taskset, most + table.held_out if taskset.INFINITE else None))
    except Exception as problem:
        raise ConfigError(
            f"the environment {table.id!r} cannot be loaded: {one_line(problem)}."
        ) from problem
    if len(tasks) <= table.held_out:
        raise ConfigError(
            f"the environment {table.id!r} has {len(tasks)} tasks, of which "
            f"task.environment.held_out={table.held_out} are held out; lower it."
        )
    return Environment(table, loaded, tasks)


def _settings(vf: Any, table: EnvironmentTable) -> dict[str, Any]:
    """Return the `[env]` block of verifiers. By default the agent of a plain taskset is the chat
    program without a shell, in a process of this machine.
    """
    taskset = {**table.args.get("taskset", {}), "id": table.id}
    settings = {**table.args, "taskset": taskset}
    if vf.env_config_type(table.id, table.args.get("id", "")) is vf.SingleAgentEnvConfig:
        agent: dict[str, Any] = {"runtime": {"type": "subprocess"}}
        if vf.default_harness_id(table.id) == "bash":
            agent["harness"] = {"id": "null"}
        settings["agent"] = agent | dict(settings.get("agent", {}))
    return settings


def code_of_environment(table: EnvironmentTable) -> str:
    """Return the release of verifiers and the SHA-256 of each Python file of the environment, as
    JSON. Raises `ConfigError`.
    """
    vf, hashes = verifiers(), dict[str, str]()
    try:
        modules = [vf.import_taskset(table.id)]
        modules += [vf.import_environment(table.args["id"])] if table.args.get("id") else []
    except Exception as problem:
        raise ConfigError(
            f"the environment {table.id!r} cannot be imported: {one_line(problem)}."
        ) from problem
    for origin in (Path(module.__file__) for module in modules):
        inside = origin.name == "__init__.py"
        for file in sorted(origin.parent.rglob("*.py")) if inside else [origin]:
            name = str(file.relative_to(origin.parent.parent if inside else origin.parent))
            hashes[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    release = importlib.import_module("verifiers").__version__
    return json.dumps({"verifiers": release, "files": hashes}, indent=1) + "\n"


class Arena:
    """An environment at work: a server of the engine, and an event loop on a thread of its own.

    Args:
        environment: The environment.
        engine: Engine of the run. It outlives the arena.
        stop: Strings that end a turn.

    Raises `RolloutFailed` if the environment does not start in time.
    """

    def __init__(
        self, environment: Environment, engine: InferenceEngine, stop: Sequence[str] = ()
    ) -> None:
        from nano_inference.server import ServerConfig, running_server

        self._environment, self._stop, self._hangs = environment, stop, False
        self._client, self._closing = RolloutClient(engine), asyncio.Event()
        config = ServerConfig(
            port=0, served_model_name=MODEL, generation_config="none", log_level="error"
        )
        loop: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(loop,), name="environment", daemon=True
        )
        with ExitStack() as opened:
            self._url = opened.enter_context(running_server(self._client, config))
            self._thread.start()
            try:
                self._loop = loop.result(PATIENCE)
            except Exception as problem:  # its thread is abandoned
                raise RolloutFailed(
                    f"the environment {environment.table.id!r} does not start: {one_line(problem)}."
                ) from problem
            opened.callback(self._leave)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close server and environment. An environment that hangs is abandoned."""
        self._opened.close()

    def _run(self, loop: "Future[asyncio.AbstractEventLoop]") -> None:
        """Serve the environment on this thread, until the arena is closed."""
        try:
            asyncio.run(self._serve(loop))
        except Exception as problem:
            if loop.done():
                log.exception("the environment has failed at its end")
            else:
                loop.set_exception(problem)

    async def _serve(self, loop: "Future[asyncio.AbstractEventLoop]") -> None:
        async with self._environment.loaded.serving():
            loop.set_result(asyncio.get_running_loop())
            await self._closing.wait()

    def _leave(self) -> None:
        """Close the environment. One that hangs is abandoned with its thread."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(0.0 if self._hangs else PATIENCE)

    def play(self, plays: Sequence[Play]) -> list[Played]:
        """Play rollouts, and return them in the same order.

        Raises `RolloutFailed`, which names the rollout, if one fails or is not over in time. The
        others are cancelled.
        """
        table, waiting = self._environment.table, [play.where for play in plays]
        rounds = math.ceil(len(plays) / table.concurrency)
        playing = asyncio.run_coroutine_threadsafe(self._all(plays, waiting), self._loop)
        try:
            return playing.result(table.timeout * (rounds + 1))
        except TimeoutError:  # its own time limits could not end it
            self._hangs = True
            running = asyncio.current_task(self._loop)
            name = running.get_name() if running is not None else ""
            raise RolloutFailed(
                f"{name if name in waiting else waiting[0]}: the environment blocks its event "
                "loop; let it await, or raise task.environment.timeout."
            ) from None

    async def _all(self, plays: Sequence[Play], waiting: list[str]) -> list[Played]:
        gate = asyncio.Semaphore(self._environment.table.concurrency)

        async def one(play: Play) -> Played:
            async with gate:
                played = await self._one(play)
            waiting.remove(play.where)
            return played

        tasks = [asyncio.create_task(one(play), name=play.where) for play in plays]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            self._client.rollouts.clear()

    async def _one(self, play: Play) -> Played:
        table, seconds = self._environment.table, self._environment.table.timeout
        rollouts: dict[str, Rollout] = {}

        def begin(trace: Any) -> None:
            rollouts[trace.id] = self._client.rollouts[trace.id] = Rollout(play.params)

        try:
            async with asyncio.timeout(seconds):
                episode = await self._environment.loaded.run_episode(
                    play.task, self._context(play.params), on_trace=begin
                )
        except TimeoutError:
            raise RolloutFailed(
                f"{play.where}: the rollout took longer than "
                f"task.environment.timeout={table.timeout:g} seconds; raise it, or repair the "
                "environment."
            ) from None
        except Exception as problem:
            raise RolloutFailed(f"{play.where}: the rollout failed: {one_line(problem)}.") from (
                problem
            )
        finally:
            for name in rollouts:
                self._client.rollouts.pop(name, None)
        return _played(episode, rollouts, play.where)

    def _context(self, params: SamplingParams) -> Any:
        """Return verifiers' description of the server."""
        vf = verifiers()
        client = vf.EvalClientConfig(
            base_url=f"{self._url}/v1",
            api_key_var="NANO_INFERENCE_NO_KEY",
            timeout={"read": self._environment.table.timeout},
        )
        more = {"stop": [*self._stop]} if self._stop else {}
        sampling = vf.SamplingConfig(
            temperature=params.temperature, max_tokens=params.max_tokens, **more
        )
        return vf.ModelContext(MODEL, client, sampling)


def _played(episode: Any, rollouts: dict[str, Rollout], where: str) -> Played:
    """Return the sample and the reward of an episode. Raises `RolloutFailed`."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        texts = [f"{error.type}: {' '.join(error.message.split())[:400]}" for error in errors]
        raise RolloutFailed(f"{where}: the rollout failed: {(texts or ['no error'])[-1]}")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) != 1:
        raise RolloutFailed(
            f"{where}: the episode has {len(traces)} trainable traces; a run trains on one."
        )
    (trace,) = traces
    turns = rollouts[trace.id].turns if trace.id in rollouts else []
    if trace.is_timeout or episode.is_timeout:
        raise RolloutFailed(
            f"{where}: a time limit of the environment has ended the rollout, so its bits depend "
            "on the machine; raise the limit."
        )
    if not turns:
        raise RolloutFailed(f"{where}: the rollout has no answer of the model.")
    if trace.num_branches != 1:
        raise RolloutFailed(
            f"{where}: the environment changes earlier messages ({trace.num_branches} branches); a "
            "run trains on one conversation."
        )
    if not math.isfinite(trace.reward):
        raise RolloutFailed(f"{where}: the reward is {trace.reward!r}; return a finite number.")
    return Played(joined(turns), float(trace.reward))
