"""What the API process and the engine process tell each other: msgspec structs, as msgpack on the
wire. The common part of a request's samples comes from the engine once.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from nano_inference.config import DEFAULT_ENTRIES, EngineConfig
from nano_inference.core.budget import IDS_OF_AN_ENTRY
from nano_inference.remote.log_lines import LogFormat
from nano_inference.structured.grammar import BackendName
from nano_inference.types import (
    AdapterInfo,
    Delta,
    EngineStats,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
)

# A log line: bytes, problem, how many others there were since the last such line.
NOT_UNDERSTOOD = (
    "a message of %d bytes was not understood: %.500r; %d more since the last such line"
)


class Begin(msgspec.Struct, frozen=True):
    """The first line that the engine process reads, as JSON. Nothing follows on stdin
    until its end: the API process has ended then.

    Attributes:
        config: the engine to build.
        inbox: ZMQ address at which the engine process is to listen.
        outbox: where the API process listens.
        log_level: of the engine process.
        log_format: its log lines, `"text"` or `"json"`.
        parent: process id of the API process.
        number: of the engine among several. Where the configuration leaves the device open and
            there are several cards, each engine takes the next one.
        meeting: path of a file in which engines in lockstep meet; empty: it is alone.
    """

    config: EngineConfig
    inbox: str
    outbox: str
    log_level: int
    log_format: LogFormat
    parent: int
    number: int = 0
    meeting: str = ""


class EngineInfo(msgspec.Struct, frozen=True):
    """What the API process must know of an engine.

    Attributes:
        model_path: as it was configured.
        tokenizer_folder: where its tokenizer is; None: it has none.
        max_model_len: tokens of prompt and completion together.
        vocab_size: rows of the embedding; token ids are below.
        eos_token_ids: ids that end a sample unless `ignore_eos`.
        max_batch_size: sequences in a step.
        numerics: fingerprint of the arithmetic.
        weight_version: that served when it started.
        pid: its process.
        block_size: tokens of a block of its KV cache.
        max_request_entries: as in its configuration.
        sampling_defaults: what the model recommends, as fields of `SamplingParams`.
        grammar_backend: as in its configuration.
        adapters: with which it started.
        experts_per_token: ids of routed experts that a sample may have for each token; 0: none.
        enable_prefix_caching: as in its configuration.
        dtype: of weights and activations, such as `"bfloat16"`; empty: not known.
        quantization: of the weights; None: there is none.
    """

    model_path: str
    tokenizer_folder: str | None
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_batch_size: int
    numerics: str
    weight_version: int
    pid: int
    block_size: int = 16
    max_request_entries: int = DEFAULT_ENTRIES
    sampling_defaults: dict[str, float] = {}
    grammar_backend: BackendName = "llguidance"
    adapters: tuple[AdapterInfo, ...] = ()
    experts_per_token: int = 0
    enable_prefix_caching: bool = True
    dtype: str = ""
    quantization: str | None = None


# -- to the engine ---------------------------------------------------------------------------------


class Generate(msgspec.Struct, tag=True, frozen=True):
    """A request, as `InferenceEngine.submit` takes it. `request_id` is the API process's own.

    `tell`: without `stream`, its tokens are told now and then all the same, so that another engine
    can go on with them.
    """

    request_id: int
    prompt: list[int]
    params: SamplingParams
    num_samples: int = 1
    stream: bool = False
    num_wanted: int | None = None
    min_version: int | None = None
    max_staleness: int | None = None
    exact_version: int | None = None
    max_entries: int | None = None
    tell: bool = False


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Resume samples of one request that another engine began (`InferenceEngine.resume_many`). The
    answers hold new tokens, and at the end the whole samples. Other fields are as in `Generate`.
    """

    request_id: int
    samples: list[TrainingSample]
    stream: bool = False
    num_wanted: int | None = None
    max_staleness: int | None = None
    version: int | None = None
    tell: bool = False


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End requests. Nothing more of them is wanted, or, `answered`, their samples with what they
    have.
    """

    request_ids: list[int]
    answered: bool = False


class Call(msgspec.Struct, tag=True, frozen=True):
    """Run an engine operation, by its name in `operations`."""

    call_id: int
    name: str
    arguments: dict[str, Any] = {}


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Shut down."""


ToEngine = Generate | Resume | Abort | Call | Stop


# -- from the engine -------------------------------------------------------------------------------


class CannotStart(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot be built, for an error of this class (a name in
    `nano_inference.errors`).
    """

    error: str
    message: str


class Loading(msgspec.Struct, tag=True, frozen=True):
    """How far building the engine has come, such as "loading x: 1.0 GiB of 4.0 GiB (25%)"."""

    state: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine is built."""

    info: EngineInfo


class Outputs(msgspec.Struct, tag=True, frozen=True):
    """The deltas of one step.

    Attributes:
        deltas: they, and the samples in them, carry the engine's own request ids.
        request_ids: the API process's, delta by delta.
    """

    deltas: list[Delta]
    request_ids: list[int]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A request was not taken, for an error of this class (a name in `nano_inference.errors`)."""

    request_id: int
    error: str
    message: str


class Returned(msgspec.Struct, tag=True, frozen=True):
    """A call's result."""

    call_id: int
    value: Any = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A call's error."""

    call_id: int
    error: str
    message: str


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Now and then, also in the middle of a long step: the engine's process lives, and so far has
    its loop come.

    Attributes:
        stats: may be a second old.
        num_steps: that have begun. It grows as long as the loop gets on.
        busy: whether it has something to do: not while it is paused.
    """

    stats: EngineStats
    num_steps: int
    busy: bool


class Dead(msgspec.Struct, tag=True, frozen=True):
    """The engine has failed and its process is about to end."""

    reason: str
    public: str = ""  # see `EngineDead`


FromEngine = (
    CannotStart | Loading | Ready | Outputs | Refused | Returned | Failed | Heartbeat | Dead
)


# -- what samples have in common -------------------------------------------------------------------

# Prompt and parameters are known to who asked, and the prompt's logprobs come with the first sample
# that ends.

# entries in a message, or one delta: while it is made or read, others have to wait
AT_ONCE = 65_536


class CommonParts:
    """The engine's side of one request: takes out of its samples what the other side has. `()`
    stands for it.
    """

    def __init__(self) -> None:
        self._logprobs: tuple[float, ...] = ()
        self._top: tuple[TopLogprobs, ...] = ()

    def leave_out(self, sample: TrainingSample) -> TrainingSample:
        """The sample as it travels. Only what is the same to the bit counts as told."""
        logprobs, top = sample.prompt_logprobs, sample.prompt_top_logprobs
        if (
            logprobs is not None
            and _are_same(logprobs, self._logprobs)
            and _are_same(top or (), self._top)
        ):
            logprobs, top = (), top and ()
        else:
            self._logprobs, self._top = logprobs or (), top or ()
        common = {"prompt_logprobs": logprobs, "prompt_top_logprobs": top}
        return replace(sample, prompt_tokens=(), sampling_params=None, **common)


class AskedParts:
    """The other side of it: puts them back. All samples then share them.

    Args:
        message: the request.
    """

    def __init__(self, message: Generate | Resume) -> None:
        first = (
            message
            if isinstance(message, Generate)
            else message.samples[0]
            if message.samples
            else None
        )
        self._prompt: Sequence[int] = ()
        if isinstance(first, TrainingSample):
            self._prompt, self._params = first.prompt_tokens, first.sampling_params
        elif first is not None:
            self._prompt, self._params = first.prompt, first.params
        self._logprobs: tuple[float, ...] | None = None
        self._top: tuple[TopLogprobs, ...] | None = None

    def complete(self, delta: Delta) -> Delta:
        """A sample's last delta with all that the sample has. One that lacks nothing stays as it
        is.
        """
        sample = delta.finished
        if sample is None or sample.sampling_params is not None:
            return delta
        if sample.prompt_logprobs:
            self._logprobs, self._top = sample.prompt_logprobs, sample.prompt_top_logprobs
        self._prompt = tuple(self._prompt)
        common = {
            "prompt_logprobs": None if sample.prompt_logprobs is None else self._logprobs,
            "prompt_top_logprobs": None if sample.prompt_top_logprobs is None else self._top,
        }
        whole = replace(sample, prompt_tokens=self._prompt, sampling_params=self._params, **common)
        return replace(delta, finished=whole)


def messages_of(
    deltas: Sequence[Delta], request_ids: Sequence[int]
) -> Iterator[tuple[list[Delta], list[int]]]:
    """Deltas with the ids of their requests, in their order, in portions of which none holds too
    much.
    """
    begin = size = 0
    for place, delta in enumerate(deltas):
        own = _size(delta)
        if size and size + own > AT_ONCE:
            yield list(deltas[begin:place]), list(request_ids[begin:place])
            begin, size = place, 0
        size += own
    yield list(deltas[begin:]), list(request_ids[begin:])


def _size(delta: Delta) -> int:
    """Entries in it, about."""
    sample = delta.finished
    if sample is None:
        return 1 + len(delta.token_ids)
    best = [*(sample.top_logprobs or ())[:1], *(sample.prompt_top_logprobs or ())[1:2]]
    tokens = len(sample.completion_tokens) + len(sample.prompt_logprobs or ())
    masked = 0 if sample.sampling_mask is None else len(sample.sampling_mask.token_ids)
    if sample.routed_experts is not None:
        masked += len(sample.routed_experts.data) // IDS_OF_AN_ENTRY
    return 1 + masked + tokens * (1 + sum(len(each.token_ids) for each in best))


def _are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether they are the same to the bit. Samples of a group share the very objects; others may
    be equal.
    """
    if len(these) != len(those):
        return False
    return all(map(operator.is_, these, those)) or repr(these) == repr(those)
