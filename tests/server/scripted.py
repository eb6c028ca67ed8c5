"""A scripted engine for tests of protocols, tools and faults without a model."""

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from nano_inference.checkpoints.loading import resolve_model
from nano_inference.remote.client import STOPPING, EngineClient
from nano_inference.remote.messages import (
    Abort,
    Call,
    Dead,
    EngineInfo,
    Failed,
    Generate,
    Outputs,
    Ready,
    Refused,
    Returned,
    ToEngine,
)
from nano_inference.server.hosted import ModelSource
from nano_inference.text.detokenizer import OutputText
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import (
    Delta,
    FinishReason,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)

# Qwen's format, shortened: tools in the system message, calls as tagged JSON, reasoning in tags.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "Answer with <tool_call></tool_call> and <think></think>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% "
    "endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS_AND_CALLS = (
    "<think>\nWhat is asked? The weather.\n</think>\n\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
)


def calling(calls: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Return an answer per call, by name and arguments, in the format of `TEMPLATE`."""
    texts = [json.dumps({"name": name, "arguments": values}) for name, values in calls]
    return [f"<think>\nHm.\n</think>\n\n<tool_call>\n{text}\n</tool_call>" for text in texts]


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]


@dataclass(frozen=True)
class Script:
    """Script of one sample.

    Attributes:
        says: Text or token ids. An end-of-sequence token follows unless `ends` is False.
        ends: True if the sample ends by itself. Otherwise the last token repeats until
            `max_tokens`.
        portion: Tokens per delta.
        delay: Seconds before each delta. Without streaming, the sample waits for all its portions.
        refuse: Error with which the engine rejects the request.
        fail_after: Number of tokens after which the sample fails, as if its sampler raised.
        die_after: Number of tokens after which the engine dies.
        cached_tokens: Number of cached prompt tokens.
    """

    says: str | Sequence[int] = "Hello there."
    ends: bool = True
    portion: int = 1
    delay: float = 0.0
    refuse: Exception | None = None
    fail_after: int | None = None
    die_after: int | None = None
    cached_tokens: int = 0


@cache
def smollm2() -> Path:
    """Return the folder of a real tokenizer with a ChatML template."""
    return resolve_model("smollm2-135m")


_tokenizer = cache(load_tokenizer)  # half a second each


def logprob(place: int) -> float:
    """Return the logprob of the token at this position of any sample or prompt."""
    return -0.25 - place % 4


class ScriptedClient(EngineClient):
    """Client that answers each request by a script.

    Args:
        script: Script of every sample, or a function of the request and the sample's index.
        tokenizer_folder: Tokenizer to use, SmolLM2's by default. See `with_template`.
        max_model_len: Greatest number of tokens of prompt and completion together.

    Attributes:
        requests: All submitted requests.
        aborted: Ids of aborted requests.
        calls: All calls. They return `returns[name]`, and fail without an entry.
    """

    def __init__(
        self,
        script: Script | Callable[[Generate, int], Script] | None = None,
        *,
        tokenizer_folder: Path | None = None,
        max_model_len: int = 2048,
        max_backlog: int = 4096,
    ) -> None:
        super().__init__(max_backlog)
        self.script: Script | Callable[[Generate, int], Script] = (
            script if script is not None else Script()
        )
        self.folder: Path | None = tokenizer_folder if tokenizer_folder is not None else smollm2()
        self.tokenizer: Tokenizer = _tokenizer(tokenizer_folder or smollm2())
        self.max_model_len = max_model_len
        self.requests: list[Generate] = []
        self.aborted: list[int] = []
        self.calls: list[Call] = []
        self.returns: dict[str, object] = {
            "get_weight_version": 0,
            "take_in": None,
            "embed": [bytes(8)],
            "request_statuses": (),
        }
        self.failure: Exception | None = None  # exceptions of calls
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[int, list[asyncio.Task[None]]] = {}
        self._ended: set[int] = set()  # requests that end with their current tokens

    async def start(self) -> None:
        self._receive(Ready(self._engine_info()))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        self._die(STOPPING, STOPPING)

    def die(self, reason: str = "the script says so.") -> None:
        """Die as an engine does. Call it on the server's loop, or let a script do it."""
        self._receive(Dead(reason, "a step failed: KeyError"))

    def _engine_info(self) -> EngineInfo:
        eos = self.tokenizer.eos_token_id
        return EngineInfo(
            model_path="scripted",
            tokenizer_folder=None if self.folder is None else str(self.folder),
            max_model_len=self.max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=() if eos is None else (eos,),
            max_batch_size=32,
            numerics="scripted",
            weight_version=0,
            pid=0,
        )

    def _send(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self.requests.append(message)
                tasks = [self._start(message, index) for index in range(message.num_samples)]
                self._running[message.request_id] = tasks
            case Abort(request_ids, answered=True):
                self._ended |= set(request_ids)
            case Abort(request_ids):
                self.aborted += request_ids
                for request_id in request_ids:
                    for task in self._running.pop(request_id, ()):
                        task.cancel()
            case Call(call_id, name):
                self.calls.append(message)
                self._later(self._returned(call_id, name))
            case _:
                pass

    def _returned(self, call_id: int, name: str) -> Returned | Failed:
        if self.failure is not None:
            return Failed(call_id, type(self.failure).__name__, str(self.failure))
        if name not in self.returns:
            return Failed(call_id, "InvalidRequest", f"the script has no {name}.")
        return Returned(call_id, self.returns[name])

    def _later(self, message: Returned | Failed) -> None:
        asyncio.get_running_loop().call_soon(self._receive, message)

    def _start(self, request: Generate, index: int) -> "asyncio.Task[None]":
        script = self.script if isinstance(self.script, Script) else self.script(request, index)
        task = asyncio.get_running_loop().create_task(self._play(request, index, script))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _play(self, request: Generate, index: int, script: Script) -> None:
        if script.refuse is not None:
            await asyncio.sleep(0)
            if not index:
                self._receive(
                    Refused(request.request_id, type(script.refuse).__name__, str(script.refuse))
                )
            return None
        sample = _Sample(request, index, script, self.tokenizer)
        for begin in range(0, len(sample.token_ids), script.portion):
            await asyncio.sleep(script.delay)
            if request.request_id in self._ended:
                sample.cut(begin)
                break
            end = min(begin + script.portion, len(sample.token_ids))
            if script.die_after is not None and end > script.die_after:
                return self.die()
            if request.stream:
                self._receive(Outputs([sample.delta(begin, end)], [request.request_id]))
        await asyncio.sleep(0)
        return self._receive(Outputs([sample.last()], [request.request_id]))


@dataclass
class _Sample:
    request: Generate
    index: int
    script: Script
    tokenizer: Tokenizer
    token_ids: list[int] = field(init=False)
    finish_reason: FinishReason = "length"
    stop_reason: int | str | None = None
    _text: OutputText | None = None
    _pieces: list[str] = field(default_factory=list[str])  # new text with each token
    _rest: str = ""

    def __post_init__(self) -> None:
        params = self.request.params
        self._text = OutputText(self.tokenizer, params.stop) if params.stop else None
        self.token_ids = []
        for token_id in self._said(params):
            if self._take(token_id, params):
                break
        if self._text is not None:
            self._rest = self._text.finish()

    def _said(self, params: SamplingParams) -> list[int]:
        says = self.script.says
        ids = self.tokenizer.encode(says) if isinstance(says, str) else list(says)
        if self.script.ends and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        ids += ids[-1:] * (params.max_tokens - len(ids))
        ids = ids[: params.max_tokens]
        return ids if self.script.fail_after is None else ids[: self.script.fail_after]

    def _take(self, token_id: int, params: SamplingParams) -> bool:
        """Send one portion. Return True if the sample ends with it."""
        self.token_ids.append(token_id)
        eos = self.tokenizer.eos_token_id
        is_stop = token_id in params.stop_token_ids or (token_id == eos and not params.ignore_eos)
        if is_stop and len(self.token_ids) > params.min_tokens:
            self.finish_reason, self.stop_reason = "stop", token_id
            self._pieces.append("")
            return True
        matched = None
        if self._text is not None:
            matched = self._text.append(token_id, len(self.token_ids) > params.min_tokens)
            self._pieces.append(self._text.take())
            if matched is not None:
                self.finish_reason, self.stop_reason = "stop", matched
        return matched is not None

    def cut(self, length: int) -> None:
        """End the sample here as aborted."""
        del self.token_ids[length:]
        self.finish_reason, self.stop_reason = "abort", None

    def delta(self, begin: int, end: int) -> Delta:
        params = self.request.params
        return Delta(
            self.request.request_id,
            self.index,
            tuple(self.token_ids[begin:end]),
            tuple(map(logprob, range(begin, end))),
            None if self._text is None else "".join(self._pieces[begin:end]),
            top_logprobs=tuple(map(self._top, range(begin, end))) if params.top_logprobs else None,
            raw_logprobs=tuple(map(logprob, range(begin, end))) if params.raw_logprobs else None,
            cached_tokens=self.script.cached_tokens,
        )

    def last(self) -> Delta:
        failed = self.script.fail_after is not None
        text = None if self._text is None else self._text.text
        last = Delta(
            self.request.request_id, self.index, (), (), None if text is None else self._rest
        )
        return replace(
            last,
            finished=self._training_sample(text, failed),
            cached_tokens=self.script.cached_tokens,
        )

    def _training_sample(self, text: str | None, failed: bool) -> TrainingSample:
        params, count = self.request.params, len(self.token_ids)
        prompt = tuple(self.request.prompt)
        more = {}
        if params.prompt_logprobs:
            more["prompt_logprobs"] = (math.nan, *map(logprob, range(1, len(prompt))))
        if most := getattr(params, "prompt_top_logprobs", 0):
            rows = [_top_of(token_id, logprob(i), most) for i, token_id in enumerate(prompt)]
            more["prompt_top_logprobs"] = (TopLogprobs((), ()), *rows[1:])
        return TrainingSample(
            prompt_tokens=prompt,
            completion_tokens=tuple(self.token_ids),
            logprobs=tuple(map(logprob, range(count))),
            ref_logprobs=None,
            weight_version=0,
            finish_reason="abort" if failed else self.finish_reason,
            stop_reason="error: the draw raised ValueError" if failed else self.stop_reason,
            weight_versions=(VersionSpan(0, 0, count),),
            raw_logprobs=tuple(map(logprob, range(count))) if params.raw_logprobs else None,
            top_logprobs=tuple(map(self._top, range(count))) if params.top_logprobs else None,
            seed=params.seed if params.seed is not None else 1234,
            sample_index=self.index,
            request_id=self.request.request_id,
            cached_tokens=self.script.cached_tokens,
            text=text,
            sampling_params=params,
            **more,
        )

    def _top(self, place: int) -> TopLogprobs:
        return _top_of(self.token_ids[place], logprob(place), self.request.params.top_logprobs)


def _top_of(token_id: int, first: float, count: int) -> TopLogprobs:
    """Return the token itself and then its neighbors."""
    return TopLogprobs(
        tuple((token_id + i) % 49152 for i in range(count)),
        tuple(first - 0.5 * i for i in range(count)),
    )


def sources(client: EngineClient) -> list[ModelSource]:
    """Return the sources of a server with this engine."""
    return [ModelSource((), lambda: client)]


def with_template(folder: Path, template: str | None) -> Path:
    """Create a tokenizer folder with SmolLM2's vocabulary and this chat template, or without one if
    None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = smollm2()
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = (source / "tokenizer_config.json").read_text(encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
