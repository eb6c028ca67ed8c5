"""Frozen configuration. Every default of the package is set here or in `resolve`."""

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from nano_inference.errors import ConfigError
from nano_inference.features import ENGINE_LIMITS, Setting, require
from nano_inference.fields.options import (
    check_least,
    choices,
    is_number,
    is_whole,
    option,
    strict_options,
)
from nano_inference.structured.grammar import BackendName

# Entries per request (`core/budget.py`), enough for 128 samples of 32,768 tokens, or for 16 of
# 8,192 with top_logprobs=20.
DEFAULT_ENTRIES = 5_000_000

CacheType = Literal["paged", "radix"]
Speculation = Literal["none", "auto", "ngram", "suffix", "history"]
Backend = Literal["auto", "reference", "cpu", "cuda"]
Attention = Literal["auto", "reference", "cpu", "flex", "triton"]
DType = Literal["auto", "fast", "float32", "bfloat16", "float16"]
# formats of quantized weights
Codes = Literal["int8", "int8-32", "int4", "fp8", "file"]
Quantization = Literal["auto", "none", Codes]
KVCacheDType = Literal["auto", "int8", "fp8"]
CpuSums = Literal["auto", "pairs", "tiles"]
SELF = "self"  # draft_model: layers of the policy itself
MTP = "mtp"  # draft_model: multi-token prediction layer of the policy's checkpoint
# groups of options in `--help`
ENGINE, RANKS, DRAFTS = "The engine", "Several processes", "Drafts"
# number of keys in an attention segment, at absolute positions; equals that of kernels/attention.h
SEGMENT = 512


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a single step.

    Attributes:
        max_batch_size: Maximum sequences per step.
        max_tokens_per_batch: Maximum tokens per step, over all sequences. May be smaller than the
            number of running sequences. The oldest requests then run first, and the samples of one
            request advance evenly.
        block_size: Tokens per KV block.
        max_chunk_tokens: Maximum tokens of one sequence per step. None sets no limit of its own.
        enable_prefix_caching: Let a new sequence reuse blocks that an earlier one computed.
        enable_chunked_prefill: Allow a prompt to be computed over several steps.
        groups: Number of groups of sequences that take turns, one per step in flight (the stages of
            a pipeline). Above 1, a sequence with a token in flight is not planned. A step then
            draws for at most its share of the sequences, so that the others fill the other stages.
        max_drafts: Maximum drafts of one sequence per step. Above 0, a sequence with a token in
            flight is not planned.
    """

    max_batch_size: int = 256
    max_tokens_per_batch: int = 8192
    block_size: int = 16
    max_chunk_tokens: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    groups: int = 1
    max_drafts: int = 0

    @property
    def max_draws(self) -> int:
        """Maximum rows that a step draws at. It bounds the memory of the draw."""
        return max(self.max_batch_size, self.max_drafts + 1)


@strict_options(ConfigError)
@dataclass(frozen=True)
class EngineConfig:
    """Complete configuration of an engine. Unknown or contradictory options raise `ConfigError`.

    Attributes:
        model_path: Hugging Face folder, hub id, `.gguf` file, or embedded model (`"smollm2-135m"`,
            `"gemma3-270m"`).
        tokenizer_path: Folder or hub id to read the tokenizer from. None uses the model's.
        ref_model_path: Frozen model that scores every finished sample
            (`TrainingSample.ref_logprobs`). It needs the policy's vocabulary. The same path as
            `model_path` gives a frozen copy of the initial policy. None disables scoring.
        cache_type: Index of cached prefixes. `"paged"` is a hash table over full blocks, `"radix"`
            a tree over token ids.
        block_size: Tokens per KV block.
        max_batch_size: Maximum sequences per step.
        max_tokens_per_batch: Maximum tokens per step, over all sequences.
        max_chunk_tokens: Maximum tokens of one sequence per step. None leaves only the step's
            limit.
        max_model_len: Maximum tokens of prompt and completion together. None uses the model's own
            limit. Values above that limit or the size of the KV cache are lowered, with a log line
            at start-up.
        kv_cache_memory: Size of the KV cache in bytes. None takes a quarter of the free memory on a
            CPU and the rest of `gpu_memory_utilization` on CUDA, but at most the memory of
            `max_batch_size * max_model_len` tokens. Free memory respects the limits of control
            groups, such as a container's (docs/caches.md). A value above the free memory raises
            `ConfigError`.
        kv_cache_dtype: Format of keys and values. `"auto"` stores them in `dtype`. `"int8"` and
            `"fp8"` (e4m3) store codes of 8 bits with a scale per token and head, in about half the
            memory of bfloat16 (docs/caches.md). `"fp8"` needs `backend="cuda"` or `"reference"`.
        gpu_memory_utilization: Share of the GPU's memory that may be in use in total: weights, KV
            cache, workspace of a step, CUDA graphs, and the memory of other processes. CUDA only.
        dtype: `"float32"`, `"bfloat16"`, `"float16"`, `"auto"` or `"fast"`. `"fast"`, the default
            of `generate`, `chat` and `serve` without `--rl`, is `"auto"`, but bfloat16 for a
            float32 checkpoint if the CPU kernels decode faster in it. `"auto"` uses the dtype of
            the checkpoint, with these exceptions. GGUF files use bfloat16 on CUDA and on CPUs that
            compute it faster (docs/models.md), and float32 on others. Quantized checkpoints, which
            are dequantized during loading, use bfloat16, and so does any model with `quantization`.
            Float16 checkpoints use bfloat16 on the CPU kernels, which do not support float16.
        quantization: Format of the weights of layers and head: codes of 8 or 4 bits with scales,
            which the kernels multiply directly (docs/models.md). `"int8"`: 8 bits, a scale per row
            (projections o and down: per segment of a row). `"int8-32"`: 8 bits, a scale per 32
            weights. `"int4"`: 4 bits in layers and 8 in the head, a scale per 32 weights. `"fp8"`:
            e4m3, a scale per row, with inputs that are not rounded. `"file"`:
            the blocks of a `.gguf` file or the codes of a quantized checkpoint, unchanged. None or
            `"none"`: plain weights of `dtype`. `"auto"`: `"file"` for a `.gguf` file on a CPU whose
            kernels multiply its blocks, unless `dtype`, another backend, several ranks or a
            reference model need plain weights. Otherwise None. Weight
            updates are quantized on arrival. The engine warns of this if `"auto"` chose the blocks.
            The CPU kernels have all but `"fp8"`, the CUDA kernels `"int8"`, `"fp8"` and, in
            `"file"`, experts in MXFP4.
        device: `"cpu"`, `"cuda"`, `"cuda:N"` or `"auto"`. `"auto"` uses a GPU if there is one.
        backend: Implementation of the operations. `"cpu"`: C++ kernels, which a C++ compiler builds
            on first use in about a minute. `"cuda"`: Triton kernels, built on first use, and
            cuBLAS. `"reference"`: plain torch. `"auto"`: the best one that the machine and the
            other options allow.
        attention: Implementation of attention. `"auto"` uses the backend's own. `"reference"` and
            `"flex"` belong to the reference backend, `"cpu"` to the CPU backend, `"triton"` to the
            CUDA backend. `"flex"` is torch's flex_attention, compiled on demand for a handful of
            shapes (seconds each, and a CPU needs a C++ compiler). It is not schedule-invariant.
        cpu_sums: Order in which the CPU kernels add products of bfloat16. `"pairs"` gives the same
            bits on every processor. `"tiles"` is the order of the matrix instructions of Intel
            servers (AMX), which are several times faster. Other processors compute the same bits
            more slowly, with kernels that need a compiler. `"auto"` uses tiles with AMX, otherwise
            pairs. Samples name the order (`TrainingSample.numerics`).
        enable_prefix_caching: Let a new sequence reuse blocks that an earlier one computed.
        enable_chunked_prefill: Allow a prompt to be computed over several steps.
        lookahead: Steps planned before the tokens of the last one are known, 0 or 1. None: 0 on a
            CPU, 1 on CUDA. With pipeline stages it always equals the number of other stages.
        batch_invariant: Make the bits of a token depend only on the weights and the preceding
            tokens, never on concurrent requests. True rejects options that break this, and replaces
            cuBLAS on CUDA by slower kernels of our own. None enables it if it costs nothing (CPU
            kernels, and the reference backend on a CPU).
        cuda_graphs: Replay captured graphs (CUDA backend only). False launches every kernel from
            Python, for measuring or debugging.
        cuda_overlap: Start kernels of decodes of up to 8 sequences while their predecessor runs
            (programmatic dependent launch). Changes no bit. Needs a GPU of compute capability 9.0.
        num_threads: Threads of the CPU kernels and of torch's CPU operations, at most 64, or the
            number of processors if larger. None uses the physical cores available to this process,
            within the limits of control groups. For torch the value applies to the whole process.
        max_request_entries: Maximum numbers that the engine holds and returns for one request, over
            all its samples: logprobs, ids of sampling masks, biases and so on (docs/sampling.md).
            Larger requests are rejected. A sample ends early if its mask outgrows its share.
        grammar_backend: Library that builds the masks of grammars that name no backend
            (docs/structured.md): `"llguidance"`, or `"xgrammar"` or `"outlines"` with the extra of
            that name.
        speculation: Source of draft tokens, which let a step compute several tokens of a sample
            (docs/speculation.md). No token and no bit depends on it. `"ngram"` drafts from the
            sample's own text, `"suffix"` also from its siblings, `"history"` also from earlier
            samples of the same prompt. `"auto"` is `"suffix"`. All except `"none"` also draft the
            tokens that a grammar forces.
        draft_model: Additional draft model: a path like `model_path`, with the policy's vocabulary,
            `"self"` for layers of the policy itself (`draft_layers`), or `"mtp"` for its layer of
            multi-token prediction. It draws with the noise of the samples and runs on one rank.
            None disables it.
        draft_layers: Number of the policy's layers that `draft_model="self"` uses, spread evenly
            and including the first and the last. None uses all.
        draft_quantization: Format of the codes of `draft_model="self"`, or of `"mtp"` and the head
            that it draws with, as for `quantization`. They are made from the policy's weights after
            each update. None shares the policy's weights.
        max_drafts: Maximum draft tokens per sample and step.
        enable_return_routed_experts: Record the experts of every token, so that samples can return
            them (`SamplingParams.routed_experts`). The record takes two bytes per expert and counts
            as part of the KV cache. For models with experts, on one rank, with `backend="cpu"` or
            `"reference"`.
        max_loras: Maximum adapters loaded at the same time (docs/adapters.md). 0 means as many as
            `loras` names. On a GPU with `backend="cuda"`.
        max_lora_rank: Highest LoRA rank accepted, at most 256.
        loras: Adapters to load at start-up, each as `"NAME=FOLDER"` with a folder saved by PEFT.
        kept_cache_folder: Folder for blocks that a request asked to keep
            (`SamplingParams.keep_cache_seconds`) and that are evicted from memory. They are read
            back when a prompt begins with them (docs/caches.md). The engine writes to a private
            subfolder, which it removes at its end. On one rank. None drops such blocks.
        kept_cache_bytes: Maximum size of the files in `kept_cache_folder`, in bytes. Beyond it the
            oldest are removed. None means 4 GiB.
        receipt_key: PEM file with an Ed25519 private key that signs receipts (docs/receipts.md).
            Needs the extra `receipts`. None leaves them unsigned.
        seed: Seed from which requests without a seed get theirs. None uses the operating system's
            entropy.
        tensor_parallel: Ranks that share every layer: 1, 2, 4, 8 and so on. Each is a process. The
            first is the engine's own.
        pipeline_parallel: Number of stages, each with its own layers. The sequences form as many
            groups, which take turns in the stages, so some stages idle if there are fewer sequences
            than stages.
        context_parallel: Ranks that share the keys and values of every sequence: 1, 2, 4 and so on.
            Each stores its part of every block, so `block_size` must be a multiple of 512 tokens
            per rank. All of them compute long prompts. Needs `backend="cpu"` or `"reference"`.
        expert_parallel: Ranks over which the experts of a mixture are spread: 1, or as many as
            `tensor_parallel`. With one tensor rank, the number of engines in lockstep, which only a
            fleet starts.
        rank_timeout: Seconds to wait for a rank before the engine shuts down.
    """

    model_path: str
    tokenizer_path: str | None = option(
        None, ENGINE, "Read tokenizer and chat template from this folder or hub id.", "--tokenizer"
    )
    ref_model_path: str | None = option(
        None, ENGINE, "Score every sample with this frozen model (ref_logprobs).", "--ref-model"
    )
    cache_type: CacheType = option("paged", ENGINE, "Index of cached prefixes: hash table or tree.")
    block_size: int = option(16, ENGINE, "Tokens per KV block.", least=1)
    max_batch_size: int = option(256, ENGINE, "Maximum sequences per step.", least=1)
    max_tokens_per_batch: int = option(
        8192, ENGINE, "Maximum tokens per step. Lower values keep running streams smooth.", least=1
    )
    max_chunk_tokens: int | None = option(
        None, ENGINE, "Maximum tokens of one prompt per step.", least=1
    )
    max_model_len: int | None = option(
        None,
        ENGINE,
        "Maximum tokens of prompt and completion. Lowered to what model and memory allow.",
        least=1,
    )
    kv_cache_memory: int | None = option(
        None, ENGINE, "Memory of the KV cache, such as 512MiB or 2GiB.", least=1, size=True
    )
    kv_cache_dtype: KVCacheDType = option(
        "auto",
        ENGINE,
        "int8, fp8: keep keys and values as codes of 8 bits. auto: as --dtype.",
        aliases={"fp8_e4m3": "fp8"},
    )
    gpu_memory_utilization: float = option(0.9, ENGINE, "Share of a GPU's memory to use, 0 to 1.")
    dtype: DType = option(
        "auto",
        ENGINE,
        "Data type of weights and KV cache. auto: as in the checkpoint. fast: bfloat16 for a "
        "float32 checkpoint, if the CPU decodes faster in it.",
        aliases={
            "fp16": "float16",
            "half": "float16",
            "bf16": "bfloat16",
            "fp32": "float32",
            "float": "float32",
        },
    )
    quantization: Quantization | None = option(
        "auto",
        ENGINE,
        "Keep weights as codes of 8 or 4 bits. auto: those of a .gguf file on a CPU; none: numbers "
        "of --dtype.",
    )
    device: str = option("auto", ENGINE, "cpu, cuda or cuda:N. auto: a GPU if there is one.")
    backend: Backend = option("auto", ENGINE, "Implementation of the operations.")
    attention: Attention = option("auto", ENGINE, "Implementation of attention.")
    cpu_sums: CpuSums = option(
        "auto", ENGINE, "Summation order for bfloat16. pairs: identical bits on every CPU."
    )
    enable_prefix_caching: bool = option(
        True,
        ENGINE,
        "Reuse common prefixes of prompts.",
        "--prefix-caching/--no-prefix-caching",
    )
    enable_chunked_prefill: bool = option(
        True,
        ENGINE,
        "Split long prompts over several steps.",
        "--chunked-prefill/--no-chunked-prefill",
    )
    lookahead: int | None = option(
        None, ENGINE, "Plan 0 or 1 steps ahead. Default: 1 on a GPU, else 0."
    )
    batch_invariant: bool | None = option(
        None, ENGINE, "Give the same bits regardless of other requests."
    )
    cuda_graphs: bool = option(True, ENGINE, "Replay steps from CUDA graphs.")
    cuda_overlap: bool = option(
        False, ENGINE, "Overlap kernels of decodes of up to 8 sequences (Hopper and later)."
    )
    num_threads: int | None = option(
        None,
        ENGINE,
        "CPU threads. Default: the physical cores.",
        "--threads",
        least=1,
    )
    max_request_entries: int = option(
        DEFAULT_ENTRIES,
        "Limits",
        "Maximum numbers in an answer: logprobs, mask ids, biases. Default: 5 million; 40 million "
        "with --rl.",
        least=1,
    )
    grammar_backend: BackendName = option("llguidance", ENGINE, "Library that enforces grammars.")
    speculation: Speculation = option(
        "none", DRAFTS, "Speculative decoding method. Output is unchanged."
    )
    draft_model: str | None = option(
        None,
        DRAFTS,
        "Draft with this model. self: with layers of the model itself. mtp: with its "
        "layer of multi-token prediction.",
        "--draft-model",
    )
    draft_layers: int | None = option(
        None, DRAFTS, "With --draft-model self: number of layers that draft.", least=1
    )
    draft_quantization: Codes | None = option(
        None, DRAFTS, "With --draft-model self: draft with weights as codes of 8 or 4 bits."
    )
    max_drafts: int = option(8, DRAFTS, "Maximum drafted tokens per sample and step.", least=1)
    enable_return_routed_experts: bool = option(
        False, ENGINE, "Record the experts of every token, for samples that ask for them."
    )
    max_loras: int = option(0, ENGINE, "Maximum LoRA adapters loaded at the same time.", least=0)
    max_lora_rank: int = option(64, ENGINE, "Highest LoRA rank to accept.", least=1)
    loras: tuple[str, ...] = option(
        (),
        ENGINE,
        "Load this LoRA adapter. May be repeated.",
        "--lora",
        each=str,
        metavar="NAME=FOLDER",
    )
    kept_cache_folder: str | None = option(
        None, ENGINE, "Write kept KV blocks here when memory runs out. Default: drop them."
    )
    kept_cache_bytes: int | None = option(
        None, ENGINE, "Size limit of the cache folder. Default: 4 GiB.", least=1, size=True
    )
    receipt_key: str | None = option(
        None, ENGINE, "Sign receipts with this Ed25519 key, a PEM file.", metavar="FILE"
    )
    seed: int | None = option(
        None, ENGINE, "Derive the seeds of requests without one from this number."
    )
    tensor_parallel: int = option(
        1, RANKS, "Processes that share every layer: 1, 2, 4, 8 …", least=1
    )
    pipeline_parallel: int = option(
        1, RANKS, "Processes that hold consecutive layers each.", least=1
    )
    context_parallel: int = option(
        1, RANKS, "Processes that share the KV cache of a sequence: 1, 2, 4 …", least=1
    )
    expert_parallel: int = option(
        1, RANKS, "Processes that share the experts of a mixture.", least=1
    )
    rank_timeout: float = option(60.0, RANKS, "Seconds to wait for another process.")

    def __post_init__(self) -> None:
        if self.quantization == "none":
            object.__setattr__(self, "quantization", None)
        _check_text(self)
        _check_choices(self)
        _check_numbers(self)
        _check_ranks(self)
        _check_context(self)
        _check_drafts(self)
        _check_adapters(self)
        require(ENGINE_LIMITS, Setting(self))

    @property
    def drafts(self) -> bool:
        """True if tokens are drafted."""
        return self.speculation != "none" or self.draft_model is not None

    @property
    def most_loras(self) -> int:
        """Maximum number of adapters loaded at the same time."""
        return max(self.max_loras, len(self.loras))

    @property
    def has_adapters(self) -> bool:
        """True if adapters can be loaded."""
        return self.most_loras > 0

    @property
    def names_dtype(self) -> bool:
        """True if `dtype` is a dtype, not a way to choose one."""
        return self.dtype not in ("auto", "fast")

    @property
    def codes(self) -> Codes | None:
        """Format of quantized weights. None for plain weights, and for `"auto"` until an engine is
        built from the configuration.
        """
        codes = self.quantization
        return None if codes is None or codes == "auto" or codes == "none" else codes

    @property
    def scheduler(self) -> SchedulerConfig:
        """Part of the configuration that the scheduler reads."""
        return SchedulerConfig(
            max_batch_size=self.max_batch_size,
            max_tokens_per_batch=self.max_tokens_per_batch,
            block_size=self.block_size,
            max_chunk_tokens=self.max_chunk_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            groups=self.pipeline_parallel,
            max_drafts=self.max_drafts if self.drafts else 0,
        )


def with_plain_weights(config: EngineConfig) -> EngineConfig:
    """Return the config of an engine whose weights a trainer reads or sends. `quantization="auto"`
    becomes plain weights, so that updates are not rounded, and `dtype="fast"` becomes `"auto"`.
    """
    return replace(
        config,
        quantization=None if config.quantization == "auto" else config.quantization,
        dtype="auto" if config.dtype == "fast" else config.dtype,
    )


def _check_text(config: EngineConfig) -> None:
    for name in ("model_path", "device"):
        _require_text(name, getattr(config, name))
    if re.fullmatch(r"auto|cpu(:0)?|cuda(:\d+)?", config.device) is None:
        raise ConfigError(
            f"device={config.device!r} is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:N'."
        )
    for name in (
        "tokenizer_path",
        "ref_model_path",
        "draft_model",
        "kept_cache_folder",
        "receipt_key",
    ):
        if getattr(config, name) is not None:
            _require_text(name, getattr(config, name))


def _check_choices(config: EngineConfig) -> None:
    for field in fields(config):
        value: object = getattr(config, field.name)
        allowed = (None, 0, 1) if field.name == "lookahead" else choices(field)
        if allowed and not any(
            type(value) is type(choice) and value == choice for choice in allowed
        ):
            listed = ", ".join(repr(choice) for choice in allowed)
            raise ConfigError(f"{field.name}={value!r} is not available; choose one of {listed}.")


def _check_adapters(config: EngineConfig) -> None:
    names: list[str] = []
    for entry in config.loras:
        parts = entry.split("=", 1) if isinstance(entry, str) else []  # pyright: ignore
        if len(parts) < 2 or not all(parts):
            raise ConfigError(f"loras: {entry!r} must be NAME=FOLDER.")
        names.append(parts[0])
    if len({*names}) < len(names):
        raise ConfigError(f"loras={config.loras!r} names an adapter twice; name each once.")
    if config.max_lora_rank > 256:
        raise ConfigError(f"max_lora_rank={config.max_lora_rank} must be at most 256.")


def _check_numbers(config: EngineConfig) -> None:
    check_least(config, ConfigError)
    share: Any = config.gpu_memory_utilization
    if not is_number(share) or not 0.0 < share <= 1.0:
        raise ConfigError(f"gpu_memory_utilization={share!r} must be a number in (0, 1].")
    if config.seed is not None and not (is_whole(config.seed, 0) and config.seed < 2**64):
        raise ConfigError(f"seed={config.seed!r} must be an integer in [0, 2**64).")


def _check_ranks(config: EngineConfig) -> None:
    seconds: Any = config.rank_timeout
    if not is_number(seconds) or not 0 < seconds <= 86400:
        raise ConfigError(
            f"rank_timeout={seconds!r} must be a number of seconds, above 0 and at most 86400."
        )
    for name in ("tensor_parallel", "context_parallel"):
        ranks = getattr(config, name)
        if ranks & (ranks - 1):
            raise ConfigError(f"{name}={ranks} must be 1, 2, 4, 8 or another power of two.")
    others = config.pipeline_parallel - 1
    if others and config.lookahead not in (None, others):
        raise ConfigError(
            f"lookahead={config.lookahead} is not possible with "
            f"pipeline_parallel={config.pipeline_parallel}, which plans {others} steps ahead; "
            "omit lookahead."
        )
    if config.expert_parallel not in (1, config.tensor_parallel) and config.tensor_parallel != 1:
        raise ConfigError(
            f"expert_parallel={config.expert_parallel} must be 1 or "
            f"tensor_parallel={config.tensor_parallel}."
        )


def _check_drafts(config: EngineConfig) -> None:
    if config.draft_quantization == "file":
        raise ConfigError(
            f"draft_quantization={config.draft_quantization!r} is not possible, because the codes "
            "are made from plain weights; use 'int8', 'int8-32' or 'int4'."
        )


def _check_context(config: EngineConfig) -> None:
    ranks, unit = config.context_parallel, SEGMENT * config.context_parallel
    if ranks == 1:
        return
    if config.block_size % unit:
        raise ConfigError(
            f"block_size={config.block_size} must be a multiple of {unit} with "
            f"context_parallel={ranks}, which splits blocks at multiples of {SEGMENT} tokens; use "
            f"block_size={-(-config.block_size // unit) * unit}."
        )


def _require_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be a non-empty string, not {value!r}.")


def require_count(name: str, value: Any) -> None:
    """Raise `ConfigError` unless an option is a positive integer."""
    if not is_whole(value, 1):
        raise ConfigError(f"{name}={value!r} must be a positive integer.")
