"""Tasks, chat programs and traces in the shape of `verifiers.v1`, with its server in between."""

import asyncio
import importlib
import inspect
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, get_args

import httpx
import uvicorn
from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

One = TypeVar("One")
Two = TypeVar("Two")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TaskConfig(_Strict): ...


class TasksetConfig(_Strict):
    id: str = ""
    task: TaskConfig = TaskConfig()


class HarnessConfig(_Strict):
    id: str = "bash"


class SubprocessConfig(_Strict):
    type: str = "subprocess"


class AgentConfig(_Strict):
    harness: HarnessConfig | None = None
    runtime: SubprocessConfig = SubprocessConfig()
    max_turns: int | None = None


class SingleAgentEnvConfig(_Strict):
    id: str = ""
    taskset: Any = None
    agent: AgentConfig = AgentConfig()


class TaskData(_Strict):
    idx: int | None = None
    prompt: str | None = None


class SamplingConfig(BaseModel):
    model_config = ConfigDict(extra="allow")
    temperature: float | None = None
    max_tokens: int | None = None


class EvalClientConfig(_Strict):
    base_url: str
    api_key_var: str
    timeout: dict[str, float]


@dataclass(frozen=True)
class ModelContext:
    model: str
    client: EvalClientConfig
    sampling: SamplingConfig


@dataclass(frozen=True)
class ProgramResult:
    exit_code: int
    stdout: str
    stderr: str


def reward(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__dict__["reward"] = True
    return function


class Task(Generic[One]):
    def __init__(self, data: Any, config: Any = None) -> None:
        self.data, self.config = data, config


class Taskset(Generic[One, Two]):
    INFINITE = False

    def __init__(self, config: Any) -> None:
        self.config = config

    def load(self) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for number, task in enumerate(self.load()):
            task.data = task.data.model_copy(update={"idx": number})
            yield task


class Harness(Generic[One]):
    async def launch(self, *arguments: Any) -> ProgramResult:
        raise NotImplementedError


@dataclass
class Trace:
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    agent: Any = field(default_factory=lambda: SimpleNamespace(trainable=True))
    chats: list[list[Any]] = field(default_factory=list[list[Any]])
    errors: list[Any] = field(default_factory=list[Any])
    reward: float = 0.0
    is_timeout: bool = False

    @property
    def assistant_messages(self) -> list[Any]:
        return [SimpleNamespace(content=chat[-1].get("content")) for chat in self.chats]

    @property
    def num_branches(self) -> int:
        """Number of chats that no other chat continues."""
        return sum(
            not any(len(other) > len(chat) and other[: len(chat)] == chat for other in self.chats)
            for chat in self.chats
        )


def _fail(trace: Trace, kind: str, message: str) -> None:
    trace.errors.append(SimpleNamespace(type=kind, message=message))


class Env:
    """A taskset with its chat program, and the server that records and forwards model calls."""

    def __init__(self, config: SingleAgentEnvConfig) -> None:
        self.taskset, self.harness = (_exported(config.taskset.id, base) for base in _PARTS)
        self.taskset, self.harness = self.taskset(config.taskset), self.harness()
        self._traces: dict[str, tuple[Trace, ModelContext]] = {}
        self._url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        server.install_signal_handlers = lambda: None  # pyright: ignore
        task = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.001)
        self._url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
        try:
            yield
        finally:
            server.should_exit = True
            await task

    async def _chat(self, request: Request) -> JSONResponse:
        trace, ctx = self._traces[request.headers["authorization"].removeprefix("Bearer ")]
        body = await request.json()
        body |= ctx.sampling.model_dump(exclude_none=True) | {"model": ctx.model}
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            url, head = f"{ctx.client.base_url}/chat/completions", {"X-Session-ID": trace.id}
            reply = await client.post(url, json=body, headers=head)
        if reply.status_code == 200:
            message = reply.json()["choices"][0]["message"]
            trace.chats.append([*body["messages"], message])
        else:
            _fail(trace, "ProviderError", f"upstream {reply.status_code}: {reply.text}")
        return JSONResponse(reply.json(), reply.status_code)

    async def run_episode(
        self, task: Any, ctx: ModelContext, *, on_trace: Callable[[Trace], None]
    ) -> Any:
        trace = Trace()
        on_trace(trace)
        self._traces[trace.id] = trace, ctx
        try:
            parts = (ctx, trace, None, self._url, trace.id, {}, task.data)
            done = await self.harness.launch(*parts)
            if done.exit_code and not trace.errors:
                _fail(trace, "HarnessError", done.stderr)
            if not trace.errors:
                await self._reward(task, trace)
        finally:
            del self._traces[trace.id]
        ok = not trace.errors
        return SimpleNamespace(ok=ok, errors=[], traces=[trace], is_timeout=False)

    async def _reward(self, task: Any, trace: Trace) -> None:
        for _, function in inspect.getmembers(task, inspect.ismethod):
            if hasattr(function, "reward"):
                try:
                    trace.reward += await function(trace)
                except Exception as problem:
                    _fail(trace, "TaskError", f"{type(problem).__name__}: {problem}")


_PARTS = Taskset, Harness


def import_taskset(name: str) -> Any:
    return importlib.import_module(name.replace("-", "_"))


def _exported(name: str, base: type) -> Any:
    module = import_taskset(name)
    return next(
        value for each in module.__all__ if issubclass(value := getattr(module, each), base)
    )


def default_harness_id(taskset_id: str) -> str:
    return taskset_id


def env_config_type(taskset_id: str, env_id: str = "") -> type:
    return SingleAgentEnvConfig


def resolve_env_config(settings: dict[str, Any]) -> SingleAgentEnvConfig:
    taskset = _exported(settings["taskset"]["id"], Taskset)
    kind = get_args(taskset.__orig_bases__[0])[1]
    return SingleAgentEnvConfig(**settings | {"taskset": kind(**settings["taskset"])})


def load_environment(config: SingleAgentEnvConfig) -> Env:
    return Env(config)
