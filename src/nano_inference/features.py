"""Table of features that cannot be combined, and `require`, which rejects a setting that a row
forbids. Configurations, the engine, the server and docs/what-works.md read the table. Relations
between numbers and limits of the machine are checked elsewhere.
"""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from nano_inference.errors import ConfigError, InvalidRequest, NanoInferenceError, WeightUpdateError

ON_GPU = "reference on a GPU"
BACKENDS = ("cpu", "reference", ON_GPU, "cuda")
RANKS = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
CODED = ("quantization", "draft_quantization")
NOT_CPU = ("reference", ON_GPU, "cuda")
TORCHS = ("cpu", "reference", ON_GPU)  # backends of plain torch and of the CPU kernels
# backend of each attention
ATTENTION_OF: dict[str, Literal["reference", "cpu", "cuda"]] = {
    "reference": "reference",
    "flex": "reference",
    "cpu": "cpu",
    "triton": "cuda",
}
# facts that no option holds
LOCKSTEP, SHARED, RUNS = "lockstep", "shared", "runs"
SEVERAL = "several_models"
# facts about a call; their value is the call's name in messages
WHOLE_MODEL, BESIDE_POLICY = "whole_model", "beside_policy"
_CLASHES = {
    LOCKSTEP: "for engines in lockstep",
    SHARED: "with several ranks",
    SEVERAL: "with several models",
}
# facts about a model; their value is the architecture's name
SINKS, CAPS = "attention sinks", "caps of attention scores"
LATENTS, STATES = "attention over latents", "layers with a state"
KINDS, WIDE_NORMS = "layers of several kinds", "a norm of queries and keys over all heads"
# no experts in any model, and no routed experts in the policy
NO_EXPERTS, NO_ROUTES = "no experts", "no routed experts"
TRAITS = (SINKS, CAPS, LATENTS, STATES, KINDS, WIDE_NORMS, NO_EXPERTS, NO_ROUTES)
_SECRETS = ("admin_key",)


class Runs(NamedTuple):
    """Backend in use, and the device that it runs on."""

    backend: str
    device: str

    @property
    def key(self) -> str:
        """Name of the backend in `Row.backends`."""
        on_gpu = self.backend == "reference" and not self.device.startswith("cpu")
        return ON_GPU if on_gpu else self.backend


class Asked(NamedTuple):
    """Option, parameter or fact that a row reads. With `values`, only these values count. Otherwise
    every value that turns it on counts, except those in `but`.
    """

    name: str
    values: tuple[Any, ...] = ()
    but: tuple[Any, ...] = ()

    def __str__(self) -> str:
        others = " other than " + " or ".join(map(repr, self.but)) if self.but else ""
        return " or ".join(_shown(self.name, value) for value in self.values) or self.name + others


class Setting:
    """Options and facts of a request or a configuration, by name.

    Args:
        options: Dataclasses, such as an `EngineConfig`.
        facts: Additional values, such as `lockstep=True`. They hide options of the same name.
    """

    def __init__(self, *options: Any, **facts: Any) -> None:
        self._options = options
        self._facts = facts

    def has(self, name: str) -> bool:
        """Return True if a name has a value."""
        return name in self._facts or any(hasattr(each, name) for each in self._options)

    def value(self, name: str) -> Any:
        """Return the value of an option or a fact, or None if it has none."""
        if name in self._facts:
            return self._facts[name]
        return next((getattr(each, name) for each in self._options if hasattr(each, name)), None)

    def is_on(self, asked: Asked) -> bool:
        """Return True if an option, parameter or fact is turned on."""
        value = self.value(asked.name)
        if asked.values:
            return self.has(asked.name) and value in asked.values
        off = value is None or value is False or value in ("auto", "none")
        return not (off or value in asked.but) and value != self._default(asked.name)

    def said(self, asked: Asked) -> str:
        """Return the text by which a message names an option that is on."""
        return _shown(asked.name, self.value(asked.name))

    def _default(self, name: str) -> Any:
        if name in RANKS:
            return 1
        if name in self._facts:
            return None
        defaults = (_defaults(each.__class__) for each in self._options if hasattr(each, name))
        return next((each.get(name) for each in defaults), None)


@dataclass(frozen=True)
class Row:
    """Feature and the settings that it cannot be combined with. A feature with several reasons has
    several rows.

    Attributes:
        feature: Name of the feature in the docs.
        asked_by: Options and facts that each turn the feature on.
        reason: Reason, as the middle of a sentence.
        instead: Advice, as the end of a sentence.
        backends: Backends that support it.
        ranks: Options of several ranks that it can be combined with.
        models: Traits that a model must not have.
        excludes: Other settings that it cannot be combined with.
        needs: Settings, at least one of which must be on.
        when: Settings that must all be on for the row to apply.
    """

    feature: str
    asked_by: tuple[Asked, ...]
    reason: str
    instead: str
    backends: tuple[str, ...] = BACKENDS
    ranks: tuple[str, ...] = RANKS
    models: tuple[str, ...] = ()
    excludes: tuple[Asked, ...] = ()
    needs: tuple[Asked, ...] = ()
    when: tuple[Asked, ...] = ()

    @property
    def clashes(self) -> tuple[Asked, ...]:
        """Settings other than backends that the feature cannot be combined with."""
        ranks = [Asked(name) for name in RANKS if name not in self.ranks]
        return (*ranks, *map(Asked, self.models), *self.excludes)

    def problem_with(self, setting: Setting) -> str | None:
        """Return a sentence about the part of a setting that this row forbids, or None."""
        asked = next(filter(setting.is_on, self.asked_by), None)
        if asked is None or not all(map(setting.is_on, self.when)):
            return None
        said, why = setting.said(asked), f"{self.reason}; {self.instead}."
        if (clash := next(self._found(setting), None)) is not None:
            return f"{said} is not possible {clash}: {why}"
        known = [each for each in self.needs if setting.has(each.name)]
        if known and not any(map(setting.is_on, self.needs)):
            return f"{said} needs {' or '.join(map(str, self.needs))}: {why}"
        return None

    def _found(self, setting: Setting) -> Iterator[str]:
        for asked in filter(setting.is_on, self.clashes):
            said, value = setting.said(asked), setting.value(asked.name)
            if asked.name in TRAITS:
                yield f"for {value}, which has {asked.name}"
            else:
                yield _CLASHES.get(asked.name, f"with {said}")
        if self.backends == BACKENDS:
            return
        for said, backend in _backends(setting):
            if backend not in self.backends:
                yield said


class Limits(NamedTuple):
    """Rows that apply to one kind of setting.

    Attributes:
        name: Name of the kind in the docs.
        error: Error that `require` raises.
        rows: Rows of the table.
    """

    name: str
    error: type[NanoInferenceError]
    rows: tuple[Row, ...]


def require(limits: Limits, setting: Setting) -> None:
    """Raise the error of `limits` if one of its rows forbids the setting."""
    for row in limits.rows:
        if (problem := row.problem_with(setting)) is not None:
            raise limits.error(problem)


def _backends(setting: Setting) -> Iterator[tuple[str, str]]:
    """Yield (text for a message, backend) for each backend that is requested or in use."""
    if setting.is_on(Asked("backend")):
        yield f"with backend={setting.value('backend')!r}", setting.value("backend")
    attention = setting.value("attention")
    if attention in ATTENTION_OF:
        yield f"with attention={attention!r}", ATTENTION_OF[attention]
    runs: Runs | None = setting.value(RUNS)
    if runs is not None:
        yield f"with the {runs.backend} backend on {runs.device}", runs.key


def _shown(name: str, value: Any) -> str:
    if name == LOCKSTEP:
        return "lockstep of engines"
    if name == SEVERAL:
        return "a server of several models"
    if name in (WHOLE_MODEL, BESIDE_POLICY):
        return str(value)
    if name in _SECRETS:
        return name
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value!r}"


@cache
def _defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the default of each field of a dataclass. For a field that is resolved later, it is
    the default without `rl`.
    """
    return {
        each.name: each.metadata["unset"][0] if "unset" in each.metadata else each.default
        for each in fields(kind)
        if each.default is not MISSING
    }


def _feature(name: str, *asked_by: str | Asked) -> partial[Row]:
    """Return a function that makes rows of a feature."""
    return partial(
        Row, name, tuple(Asked(each) if isinstance(each, str) else each for each in asked_by)
    )


_PLAIN = "use backend='cpu' or 'reference'"
_FLEX = Asked("attention", ("flex",))
_NO_PREFIXES = Asked("enable_prefix_caching", (False,))

_adapters = _feature("LoRA adapters", "max_loras", "loras")
_experts = _feature("recording of routed experts", "enable_return_routed_experts")
_draft = _feature("draft models", "draft_model")
_kept = _feature("files of kept KV blocks", "kept_cache_folder")
_coded_keys = _feature("a KV cache in 8 bits", "kv_cache_dtype")
_context = _feature("context parallel", "context_parallel")
_invariance = _feature("batch invariance", Asked("batch_invariant", (True,)))
_lockstep = _feature("engines in lockstep", "expert_parallel")
_spread = _feature("expert parallel", "expert_parallel")
_flex = _feature("flex attention", _FLEX)

ENGINE_ROWS = (
    *(
        _feature(f"{backend} attention", Asked("attention", names))(
            f"it belongs to backend={backend!r}", "omit one of the two", backends=allowed
        )
        for backend, names, allowed in (
            ("reference", ("reference", "flex"), ("reference", ON_GPU)),
            ("cpu", ("cpu",), ("cpu",)),
            ("cuda", ("triton",), ("cuda",)),
        )
    ),
    _flex(
        "it computes only plain attention over keys",
        "use attention='auto'",
        models=(SINKS, CAPS, LATENTS, STATES, KINDS),
    ),
    _feature("limits of chunks", "max_chunk_tokens")(
        "prompts are not split",
        "omit one of the two",
        excludes=(Asked("enable_chunked_prefill", (False,)),),
    ),
    _invariance(
        "sums depend on the other rows of a step",
        "use backend='cuda' on a GPU, or omit batch_invariant",
        backends=("cpu", "reference", "cuda"),
        excludes=(_FLEX,),
    ),
    _feature("summation orders of the CPU kernels", "cpu_sums")(
        "only the CPU kernels have several orders", "omit cpu_sums", backends=("cpu",)
    ),
    _feature("overlapping kernels", "cuda_overlap")(
        "only kernels of captured decodes without batch_invariant overlap",
        "omit it",
        backends=("cuda",),
        excludes=(Asked("batch_invariant", (True,)), Asked("cuda_graphs", (False,))),
    ),
    _feature("quantized weights", Asked("quantization", but=("int8", "fp8", "file")))(
        "the CUDA kernels multiply plain weights, 'int8', 'fp8' and MXFP4 experts",
        "use quantization='int8', or backend='cpu' or 'reference'",
        backends=TORCHS,
    ),
    _feature("FP8 weights", *(Asked(each, ("fp8",)) for each in CODED))(
        "the CPU kernels multiply whole numbers",
        "use 'int8', or backend='cuda' or 'reference'",
        backends=NOT_CPU,
    ),
    _feature("quantized drafts", Asked("draft_quantization", but=("int8", "fp8")))(
        "the CUDA kernels multiply plain weights, 'int8' and 'fp8'",
        "use draft_quantization='int8', or another backend",
        backends=TORCHS,
    ),
    _coded_keys(
        "its kernels read plain keys and values", "use attention='auto'", excludes=(_FLEX,)
    ),
    _feature("a KV cache in FP8", Asked("kv_cache_dtype", ("fp8",)))(
        "the CPU kernels have no such codes",
        "use kv_cache_dtype='int8', or backend='cuda' or 'reference'",
        backends=NOT_CPU,
    ),
    _coded_keys(
        "its keys are already small, or its heads differ in size",
        "use kv_cache_dtype='auto'",
        models=(LATENTS, KINDS),
    ),
    _context(
        "its kernels do not compute partial attention",
        _PLAIN,
        backends=TORCHS,
        excludes=(_FLEX,),
    ),
    _adapters(
        "it has no operations for adapters",
        "omit max_loras, or use backend='cuda' on a GPU",
        backends=("cpu", "reference", "cuda"),
    ),
    _experts(
        "one rank records the experts of all rows",
        "use replicas",
        ranks=(),
        excludes=(Asked(LOCKSTEP),),
    ),
    _experts("there is nothing to record", "omit it", models=(NO_ROUTES,)),
    _draft(
        "a draft model runs on one rank",
        "use speculation='suffix'",
        ranks=(),
        excludes=(Asked(LOCKSTEP),),
    ),
    _feature("draft models", Asked("draft_model", but=("mtp",)))(
        "a rejected draft cannot be removed from a state",
        "use speculation='suffix'",
        models=(STATES,),
    ),
    _feature("fewer layers of the policy as draft models", "draft_layers")(
        "it describes a cheaper copy of the policy",
        "set draft_model='self', or omit it",
        needs=(Asked("draft_model", ("self",)),),
    ),
    _feature("quantized drafts", "draft_quantization")(
        "it describes a cheaper copy of the policy's weights",
        "set draft_model='self' or 'mtp', or omit it",
        needs=(Asked("draft_model", ("self", "mtp")),),
    ),
    _feature("drafts by the policy itself", Asked("draft_model", ("self",)))(
        "a full copy of the policy saves no time",
        "set one of them",
        needs=(Asked("draft_layers"), Asked("draft_quantization")),
    ),
    _feature("quantized drafts", "draft_quantization")(
        "it quantizes plain weights",
        "use quantization=None",
        excludes=(Asked("quantization"),),
    ),
    _kept(
        "blocks are written and read by one rank",
        "omit kept_cache_folder or the ranks",
        ranks=(),
        excludes=(Asked(LOCKSTEP),),
    ),
    _kept("there is nothing to keep", "omit one of the two", excludes=(_NO_PREFIXES,)),
    _feature("the size of files of kept KV blocks", "kept_cache_bytes")(
        "it limits the files in that folder", "set both", needs=(Asked("kept_cache_folder"),)
    ),
    _lockstep(
        "with one tensor rank it means engines in lockstep, which have one rank each",
        "set tensor_parallel to the same number, or omit one of the two",
        excludes=(Asked("pipeline_parallel"), Asked("context_parallel")),
        when=(Asked("tensor_parallel", (1,)),),
    ),
    _feature("engines in lockstep", LOCKSTEP)(
        "engines in lockstep have one rank each",
        "use expert_parallel with tensor_parallel instead",
        ranks=("expert_parallel",),
    ),
    _spread("there are no experts to spread", "omit it", models=(NO_EXPERTS,)),
    _spread("its router and its experts read different rows", "use replicas", models=(KINDS,)),
    *(
        _feature(name, option)("ranks do not share these layers", "use replicas", models=models)
        for name, option, models in (
            ("tensor parallel", "tensor_parallel", (STATES, KINDS)),
            ("pipeline parallel", "pipeline_parallel", (STATES, KINDS)),
            ("context parallel", "context_parallel", (STATES, KINDS)),
        )
    ),
    *(
        _feature(name, option)(
            "ranks share whole key heads",
            "use pipeline_parallel or replicas",
            models=models,
        )
        for name, option, models in (
            ("tensor parallel", "tensor_parallel", (LATENTS, WIDE_NORMS)),
            ("context parallel", "context_parallel", (LATENTS,)),
        )
    ),
)

_GROUP = ("weight_update_group_init_method", "weight_update_group_world_size", "actor_llm_idx")
_ONE = Asked("replicas", (1,))

SERVER_ROWS = (
    *(
        _feature("TLS", one)("TLS needs both files", "set both, or neither", needs=(Asked(other),))
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"))
    ),
    _feature("a Unix socket", "uds")(
        "the server listens on the socket instead of an address",
        "omit host and port",
        excludes=(Asked("host"), Asked("port")),
    ),
    _feature("shared prefixes", "share_prefixes")(
        "replicas share prefixes with each other", "omit it", excludes=(_ONE,)
    ),
    _feature("detection of stalled replicas", "stall_timeout")(
        "only another replica can resume the requests of a stalled one",
        "omit it",
        excludes=(_ONE,),
    ),
    _feature("restarts of the engine", "restart_engine")(
        "an engine in the server's own process cannot be restarted",
        "omit one of the two",
        excludes=(Asked("in_process"),),
        when=(_ONE,),
    ),
    _feature("engines in the server's process", "in_process")(
        "each needs a process of its own", "omit in_process", excludes=(Asked(LOCKSTEP),)
    ),
    *(
        _feature(feature, *asked_by)(
            reason,
            instead,
            excludes=tuple(
                map(Asked, ("rl", "replicas", "restart_engine", "in_process", "prefill_replicas"))
            ),
        )
        for feature, asked_by, reason, instead in (
            (
                "several models",
                (SEVERAL,),
                "each model has one engine in a process of its own, which is started and ended",
                "serve one model, or omit it",
            ),
            (
                "unloading of an idle model",
                ("idle_unload",),
                "the engine is ended and started again from its files",
                "omit one of the two",
            ),
        )
    ),
    _feature("several models", SEVERAL)(
        "it describes one model",
        "serve one model, or omit it",
        excludes=tuple(
            map(
                Asked,
                (
                    *("tokenizer_path", "ref_model_path", "draft_model", "draft_layers", "loras"),
                    *("chat_template", "tool_format", "reasoning_format", "kept_cache_folder"),
                ),
            )
        ),
    ),
    _feature("a limit of loaded models", "max_loaded")(
        "there is only one model", "omit it", needs=(Asked(SEVERAL),)
    ),
    _feature("access without a key", "rl_open")(
        "it opens the routes without an admin key",
        "omit one of the two",
        excludes=(Asked("admin_key"),),
    ),
    _feature(
        "routes for trainers",
        *("rl_open", "rl_timeout", "rl_max_body_bytes", "disable_weight_updates", *_GROUP),
    )("it is for trainers", "set both, or omit it", needs=(Asked("rl", (True,)),)),
    *(
        _feature("a weight group", one)(
            f"{', '.join(_GROUP)} belong together", "set all three", needs=(Asked(other),)
        )
        for one, other in zip(_GROUP, (*_GROUP[1:], _GROUP[0]), strict=True)
    ),
    _feature("staying out of a weight group", "disable_weight_updates")(
        "there is no group to stay out of",
        "name the group, or omit it",
        needs=(Asked(_GROUP[0]),),
    ),
)

REQUEST_ROWS = (
    _feature("the first position of named ids", "prompt_logprob_start")(
        "it is the first position of the prompt's named ids",
        "set both",
        needs=(Asked("prompt_logprob_token_ids"),),
    ),
    _feature("top logprobs of a prompt", "prompt_top_logprobs")(
        "they are returned with the prompt's logprobs",
        "set both",
        needs=(Asked("prompt_logprobs", (True,)),),
    ),
    _feature("priorities of kept blocks", "cache_priority")(
        "only kept blocks have a priority", "set both", needs=(Asked("keep_cache_seconds"),)
    ),
)

# requests that conflict with the engine's configuration
SERVED_ROWS = (
    _feature("kept blocks", "keep_cache_seconds")(
        "the engine keeps no blocks", "omit it", excludes=(_NO_PREFIXES,)
    ),
    _feature("logits processors", "logits_processors")(
        "each process has only a part of the logits or of the steps", "use one rank", ranks=()
    ),
    _feature("routed experts of a sample", "routed_experts")(
        "otherwise the engine does not record them",
        "build the engine with it",
        needs=(Asked("enable_return_routed_experts", (True,)),),
    ),
    _feature("receipts of samples", "receipt")(
        "a receipt has the hash of whole weights, and each process holds a part",
        "use one rank",
        ranks=(),
    ),
)

CALL_ROWS = (
    _feature(
        "calls that use the whole model, such as embed, replay, DraftTrainer",
        WHOLE_MODEL,
    )(
        "it needs the whole model in one process",
        "use an engine with one rank, such as rl.one_rank(engine)",
        excludes=(Asked(SHARED),),
    ),
    _feature("updates of weights other than the policy's", BESIDE_POLICY)(
        "the engines agree only on updates of the policy",
        "use replicas",
        excludes=(Asked(LOCKSTEP),),
    ),
)

UPDATE_ROWS = (
    _feature("requests that finish on old weights", Asked("kv_policy", ("finish_old",)))(
        "each engine would have to keep its old experts for the others",
        "use another kv_policy",
        excludes=(Asked(LOCKSTEP),),
    ),
)

ENGINE_LIMITS = Limits("Engine", ConfigError, ENGINE_ROWS)
SERVER_LIMITS = Limits("Server", ConfigError, SERVER_ROWS)
REQUEST_LIMITS = Limits("Request", InvalidRequest, REQUEST_ROWS)
SERVED_LIMITS = Limits("Request to an engine", InvalidRequest, SERVED_ROWS)
CALL_LIMITS = Limits("Call", InvalidRequest, CALL_ROWS)
UPDATE_LIMITS = Limits("Weight update", WeightUpdateError, UPDATE_ROWS)
ALL_LIMITS = (
    *(ENGINE_LIMITS, SERVER_LIMITS, REQUEST_LIMITS),
    *(SERVED_LIMITS, CALL_LIMITS, UPDATE_LIMITS),
)
