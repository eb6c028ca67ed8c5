"""Messages between the API process and the engine process: msgspec structs, encoded as msgpack. The
engine sends the parts that a request's samples share only once.
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

# Arguments: size in bytes, the problem, number of similar messages since the last such line.
NOT_UNDERSTOOD = "cannot decode a message of %d bytes: %.500r; %d more since the last such line"


class Begin(msgspec.Struct, frozen=True):
    """First line on the engine process's standard input, as JSON. Nothing follows it: end of file
    means that the API process has ended.

    Attributes:
        config: Configuration of the engine.
        inbox: ZMQ address on which the engine process listens.
        outbox: ZMQ address on which the API process listens.
        log_level: Log level of the engine process.
        log_format: Format of its log lines, `"text"` or `"json"`.
        parent: Process id of the API process.
        number: Index of the engine among several. With several cards and no device configured, each
            engine takes the next card.
        meeting: Path of the rendezvous file of engines in lockstep. Empty: a single engine.
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
    """Properties of an engine that the API process needs.

    Attributes:
        model_path: Configured model path.
        tokenizer_folder: Folder of the tokenizer, or None.
        max_model_len: Maximum tokens of prompt and completion together.
        vocab_size: Rows of the embedding. Token ids are below this.
        eos_token_ids: Ids that end a sample unless `ignore_eos` is set.
        max_batch_size: Maximum sequences in a step.
        numerics: Fingerprint of the arithmetic.
        weight_version: Weight version at the start.
        pid: Process id of the engine.
        block_size: Tokens in a block of the KV cache.
        max_request_entries: Configured limit of entries per request.
        sampling_defaults: The model's recommended fields of `SamplingParams`.
        grammar_backend: Configured grammar backend.
        adapters: Adapters loaded at the start.
        experts_per_token: Maximum ids of routed experts per token. 0: none.
        enable_prefix_caching: True if prefix caching is configured.
        dtype: Type of weights and activations, such as `"bfloat16"`. Empty: unknown.
        quantization: Quantization of the weights, or None.
        memory: Bytes of weights, KV cache and the rest of its budget. 0: unknown.
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
    memory: int = 0


# -- to the engine ---------------------------------------------------------------------------------


class Generate(msgspec.Struct, tag=True, frozen=True):
    """A request, with the arguments of `InferenceEngine.submit`. The API process chooses
    `request_id`.

    `tell`: report its tokens periodically even without `stream`, so that another engine can resume
    it. `name`: name of its receiver, for `EngineCore.open_requests`.
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
    turn_of: int | None = None
    tell: bool = False
    name: str | None = None


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Resume samples of one request that another engine began (`InferenceEngine.resume_many`). The
    answers hold new tokens, and finally whole samples. Other fields are as in `Generate`.
    """

    request_id: int
    samples: list[TrainingSample]
    stream: bool = False
    num_wanted: int | None = None
    max_staleness: int | None = None
    version: int | None = None
    tell: bool = False
    name: str | None = None


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End requests. With `answered`, their samples are returned as they are. Without it, nothing
    more is sent.
    """

    request_ids: list[int]
    answered: bool = False


class Call(msgspec.Struct, tag=True, frozen=True):
    """Run the engine operation `name` of `operations`."""

    call_id: int
    name: str
    arguments: dict[str, Any] = {}


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Shut the engine down."""


ToEngine = Generate | Resume | Abort | Call | Stop


# -- from the engine -------------------------------------------------------------------------------


class CannotStart(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot be built. `error` names a class of `nano_inference.errors`."""

    error: str
    message: str


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Progress of building the engine, such as "loading x: 1.0 GiB of 4.0 GiB (25%)"."""

    state: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine is built."""

    info: EngineInfo


class Outputs(msgspec.Struct, tag=True, frozen=True):
    """Deltas of one step.

    Attributes:
        deltas: Deltas. They and their samples have the engine's own request ids.
        request_ids: The API process's request id of each delta.
    """

    deltas: list[Delta]
    request_ids: list[int]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A request was rejected. `error` names a class of `nano_inference.errors`."""

    request_id: int
    error: str
    message: str


class Returned(msgspec.Struct, tag=True, frozen=True):
    """Result of a call."""

    call_id: int
    value: Any = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Error of a call."""

    call_id: int
    error: str
    message: str


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Periodic sign of life with the engine's progress, also sent during a long step.

    Attributes:
        stats: Statistics, up to a second old.
        num_steps: Number of steps begun. It grows while the loop makes progress.
        busy: True if the engine has work. False while it is paused.
    """

    stats: EngineStats
    num_steps: int
    busy: bool


class Dead(msgspec.Struct, tag=True, frozen=True):
    """The engine has failed and its process is about to exit."""

    reason: str
    public: str = ""  # reason that clients may see, as in `EngineDead`


FromEngine = (
    CannotStart | Loading | Ready | Outputs | Refused | Returned | Failed | Heartbeat | Dead
)


# -- parts that samples share ----------------------------------------------------------------------

# The requester knows prompt and parameters. The first finished sample brings the prompt's logprobs.

# Maximum entries in a message, unless one delta has more: encoding and decoding block others.
AT_ONCE = 65_536


class CommonParts:
    """The engine's side of one request: removes the parts of samples that the other side already
    has. `()` replaces a removed part.
    """

    def __init__(self) -> None:
        self._logprobs: tuple[float, ...] = ()
        self._top: tuple[TopLogprobs, ...] = ()

    def leave_out(self, sample: TrainingSample) -> TrainingSample:
        """Return the sample for sending. Only bit-identical parts are left out."""
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
    """The API's side of one request: restores the removed parts. All samples share these objects.

    Args:
        message: The request.
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
        """Return a sample's last delta with the removed parts restored. A complete delta is
        returned unchanged.
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
    """Yield deltas with their request ids, in order, in portions of bounded size."""
    begin = size = 0
    for index, delta in enumerate(deltas):
        entries = _size(delta)
        if size and size + entries > AT_ONCE:
            yield list(deltas[begin:index]), list(request_ids[begin:index])
            begin, size = index, 0
        size += entries
    yield list(deltas[begin:]), list(request_ids[begin:])


def _size(delta: Delta) -> int:
    """Estimate the number of entries in a delta."""
    sample = delta.finished
    if sample is None:
        return 1 + len(delta.token_ids)
    best = [*(sample.top_logprobs or ())[:1], *(sample.prompt_top_logprobs or ())[1:2]]
    tokens = len(sample.completion_tokens) + len(sample.prompt_logprobs or ())
    matrices = (sample.token_id_logprobs, sample.raw_token_id_logprobs)
    matrices = (*matrices, sample.prompt_token_id_logprobs)
    named = sum(len(each.data) // 4 for each in matrices if each is not None)
    masked = named if sample.sampling_mask is None else named + len(sample.sampling_mask.token_ids)
    if sample.routed_experts is not None:
        masked += len(sample.routed_experts.data) // IDS_OF_AN_ENTRY
    return 1 + masked + tokens * (1 + sum(len(each.token_ids) for each in best))


def _are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Return True if two sequences are equal bit for bit. Samples of a group share the same
    objects, which is the fast path.
    """
    if len(these) != len(those):
        return False
    return all(map(operator.is_, these, those)) or repr(these) == repr(those)
