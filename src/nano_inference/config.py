"""Frozen configuration. Every default is settled here or in `resolve`; nothing else in the package
invents one.
"""

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

# Entries of one request (`core/budget.py`): 128 samples of 32,768 tokens, or 16 of 8,192 with their
# 20 best tokens.
DEFAULT_ENTRIES = 5_000_000

CacheType = Literal["paged", "radix"]
Speculation = Literal["none", "auto", "ngram", "suffix", "history"]
Backend = Literal["auto", "reference", "cpu", "cuda"]
Attention = Literal["auto", "reference", "cpu", "flex", "triton"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
# formats that weights are kept in as codes, and what stands for one of them or for none
Codes = Literal["int8", "int8-32", "int4", "file"]
Quantization = Literal["auto", "none", Codes]
KVCacheDType = Literal["auto", "int8"]
CpuSums = Literal["auto", "pairs", "tiles"]
SELF = "self"  # the model that drafts is the policy, with fewer layers
# groups of options in `--help`
ENGINE, RANKS, DRAFTS = "The engine", "Several processes", "Drafts"
# keys after which attention starts anew, at absolute positions (kernels/attention.h has it too)
SEGMENT = 512


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may use.

    Attributes:
        max_batch_size: sequences in a step.
        max_tokens_per_batch: tokens in a step, all sequences together. May be smaller than the
            running set: then the oldest requests come first, and the samples of one go on evenly.
        block_size: tokens in a KV block.
        max_chunk_tokens: tokens of one sequence in a step, or None for no limit but the step's.
        enable_prefix_caching: let a new sequence start from blocks that an earlier one computed.
        enable_chunked_prefill: let a prompt be computed over several steps.
        groups: groups of sequences that take turns, as many as steps are on their way at once: the
            stages of a pipeline. Above 1 a sequence is not planned while a token of it is on its
            way, and a step draws for at most its share of the sequences, so that the others fill
            the other stages.
        max_drafts: of one sequence in a step. Above 0 too a sequence is not planned while a token
            of it is on its way.
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
        """Rows that a step draws at: bounds the memory of the draw."""
        return max(self.max_batch_size, self.max_drafts + 1)


@strict_options(ConfigError)
@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine is built from. Unknown or contradictory options raise
    `ConfigError`.

    Attributes:
        model_path: a Hugging Face folder, a hub id, a `.gguf` file, or an embedded model:
            `"smollm2-135m"`, `"gemma3-270m"`.
        tokenizer_path: another folder to take the tokenizer from; None: the model's.
        ref_model_path: a frozen model that scores every finished sample
            (`TrainingSample.ref_logprobs`), with the policy's vocabulary; the same path as
            `model_path`: a frozen copy of the initial policy. None: no scores.
        cache_type: how prefixes are indexed. `"paged"`: a hash table over full blocks; `"radix"`: a
            tree over token ids.
        block_size: tokens in a KV block.
        max_batch_size: sequences in a step.
        max_tokens_per_batch: tokens in a step, all sequences together.
        max_chunk_tokens: tokens of one sequence in a step; None: the step's limit.
        max_model_len: tokens of prompt and completion together; None: what the model was made for.
            Larger than the model's, or than what fits in the KV cache: lowered, with a start-up
            line that says so.
        kv_cache_memory: bytes for the KV cache. None: a quarter of the free memory on a CPU, what
            `gpu_memory_utilization` leaves on CUDA; never more than `max_batch_size *
            max_model_len` tokens can use. Memory is free within the limits of control groups,
            such as those of containers (docs/caches.md); more than is free raises `ConfigError`.
        kv_cache_dtype: what keys and values are kept as. `"auto"`: numbers of `dtype`; `"int8"`:
            codes of 8 bits, with a scale for each token and head, which take about half of
            bfloat16's memory (docs/caches.md). For `backend="cpu"` and `"reference"`.
        gpu_memory_utilization: share of the device's memory that may be taken in all: by weights,
            KV cache, a step's workspace, CUDA graphs, and what others hold on it (CUDA only).
        dtype: `"float32"`, `"bfloat16"`, `"float16"`, or `"auto"`: the checkpoint's; for GGUF
            bfloat16 on CUDA and on a CPU that computes it faster (docs/models.md), else float32;
            bfloat16 for a checkpoint that is quantised, which is dequantised while it is loaded,
            with `quantization`, and in the place of float16 where the CPU kernels run, which have
            none.
        quantization: keep the weights of layers and head as codes of 8 or 4 bits with scales, and
            multiply codes (docs/models.md). `"auto"`: `"file"` for a `.gguf` file on a CPU whose
            kernels multiply its blocks, unless `dtype`, another backend, several ranks or a
            reference model ask for plain weights; else None, as for embedded models. `"int8"`: 8
            bits, a scale a row (o and down: one a segment of a row); `"int8-32"`: 8 bits, a scale
            for 32 weights; `"int4"`: 4 bits in layers, 8 in the head, a scale for 32 weights;
            `"file"`: the blocks of a `.gguf` file, or the codes of a quantised checkpoint, as they
            are. Updates are quantised as they come, which an engine that `"auto"` put into blocks
            warns of. None or `"none"`: weights of `dtype`. For `backend="cpu"` and `"reference"`.
        device: `"cpu"`, `"cuda"`, `"cuda:1"` …, or `"auto"`: cuda if there is one, else cpu.
        backend: which operations run. `"cpu"`: kernels in C++, built on first use (seconds; it
            needs a C++ compiler); `"cuda"`: kernels in Triton, built on first use, and cuBLAS;
            `"reference"`: plain torch; `"auto"`: the best that this machine and the other options
            allow.
        attention: the attention of the backend (`"auto"`) or one by name; `"reference"` and
            `"flex"` belong to the reference backend, `"cpu"` to the CPU's, `"triton"` to CUDA's.
            `"flex"`: torch's flex_attention, compiled for a handful of shapes as they come up
            (seconds each; on a CPU it needs a C++ compiler). It does not keep schedule invariance.
        cpu_sums: in which order the CPU kernels add up products of bfloat16. `"pairs"`: the same
            bits on every processor. `"tiles"`: as the matrix instructions of Intel's servers (AMX)
            do it, on which it is several times faster; other processors compute the same bits more
            slowly, with kernels that a compiler has to build. `"auto"`: tiles where there is AMX,
            else pairs. Samples name the order (`TrainingSample.numerics`).
        enable_prefix_caching: let a new sequence start from blocks that an earlier one computed.
        enable_chunked_prefill: let a prompt be computed over several steps.
        lookahead: steps planned before the last one's tokens are known: 0 or 1. None: 0 on a CPU, 1
            on CUDA; with stages as many as there are other stages, and nothing else is possible.
        batch_invariant: a token's bits depend on the weights and the tokens before it alone, never
            on what else runs. True: refuse what does not keep this; on CUDA products then run on
            kernels of our own instead of cuBLAS's, which is slower. None: where it is free (the CPU
            kernels, the reference backend on a CPU).
        cuda_graphs: replay captured graphs in steps that only decode (the CUDA backend; others have
            none). False: launch every kernel from Python, to measure or to debug.
        num_threads: threads of the CPU kernels and of torch's CPU operations, at most 64 or the
            machine's cores; None: the physical cores that this process may run on, within the
            limits of control groups. For torch's it holds for the whole process.
        max_request_entries: numbers that one request may make the engine hold and its answer carry,
            all its samples together: a logprob, an id of a sampling mask, a bias …
            (docs/sampling.md). More is refused; a sample whose mask grows beyond its part of this
            ends.
        grammar_backend: what makes the masks of grammars that name no backend (docs/structured.md):
            `"llguidance"`, or `"xgrammar"` or `"outlines"` with the extra of that name.
        speculation: what guesses the next tokens, so that a step may compute several of a sample
            (docs/speculation.md); no token and no bit depends on it. `"ngram"`: the sample's own
            text; `"suffix"`: its siblings' too; `"history"`: earlier samples of the same prompt
            too; `"auto"`: `"suffix"`. All but `"none"` guess what a grammar forces too.
        draft_model: a model that guesses too: a path as `model_path`, with the policy's vocabulary,
            or `"self"`: layers of the policy itself (`draft_layers`). It draws with the noise of
            the samples, and has one rank. None: there is none.
        draft_layers: of `draft_model="self"`: how many of the policy's layers it has, spread
            evenly; the first and the last are among them. None: all.
        draft_quantization: of `draft_model="self"`: it has the policy's weights as codes, in a
            format as `quantization` names them, made anew after each weight update. None: it shares
            them.
        max_drafts: guessed tokens of one sample in a step.
        enable_return_routed_experts: keep a record of the experts that every token goes through, so
            that samples can have them (`SamplingParams.routed_experts`): two bytes an expert beside
            the KV cache, counted as part of it. For models with experts, on one rank, with
            `backend="cpu"` or `"reference"`.
        max_loras: how many adapters of low rank may be loaded at once (docs/adapters.md); 0: as
            many as `loras` names. On one rank, for `backend="cpu"` and `"reference"` on a CPU.
        max_lora_rank: of their matrices, at most 256.
        loras: adapters to begin with, each `"NAME=FOLDER"`, a folder as PEFT saves it.
        kept_cache_folder: where blocks go that a request asked to keep
            (`SamplingParams.keep_cache_seconds`) and whose memory others need; they come back when
            a prompt begins with them (docs/caches.md). They lie in a private folder of this engine
            in there, which is removed at its end. On one rank. None: they are lost.
        kept_cache_bytes: of these files at most; beyond that the oldest go. None: 4 GiB.
        seed: where fresh request seeds come from; None: the operating system's entropy.
        tensor_parallel: ranks that share every layer, a process each (the engine's own is the
            first): 1, 2, 4, 8 ….
        pipeline_parallel: stages, each with layers of its own. As many groups of sequences take
            turns in them, so fewer sequences than stages leave some of them waiting.
        context_parallel: ranks that share the keys and values of every sequence: 1, 2, 4 …. Of
            every block each stores its part, so `block_size` must be a multiple of 512 tokens a
            rank; long prompts are computed by all of them. For `backend="cpu"` and `"reference"`.
        expert_parallel: over how many ranks the experts of a mixture are spread: 1, or as many as
            `tensor_parallel`. With one tensor rank: engines in lockstep, of which this is one; only
            a fleet starts those.
        rank_timeout: seconds that a rank may take for what others wait for, before the engine ends
            for it.
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
        8192, ENGINE, "Maximum tokens per step. Fewer keep running streams smooth.", least=1
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
        "auto", ENGINE, "int8: keep keys and values as codes of 8 bits. auto: as --dtype says."
    )
    gpu_memory_utilization: float = option(0.9, ENGINE, "Share of a GPU's memory to use, 0 to 1.")
    dtype: DType = option(
        "auto",
        ENGINE,
        "Data type of weights and KV cache. auto: as in the checkpoint.",
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
    batch_invariant: bool | None = option(None, ENGINE, "Give the same bits whatever else runs.")
    cuda_graphs: bool = option(True, ENGINE, "Replay decode steps from CUDA graphs.")
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
        "Draft with this model. self: with layers of the model itself.",
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
    max_loras: int = option(0, ENGINE, "Maximum LoRA adapters loaded at once.", least=0)
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
        """Whether anything guesses the next tokens."""
        return self.speculation != "none" or self.draft_model is not None

    @property
    def codes(self) -> Codes | None:
        """The codes that weights are kept as; None: they are numbers, or `"auto"` is not settled
        yet, which building an engine does.
        """
        asked = self.quantization
        return None if asked is None or asked == "auto" or asked == "none" else asked

    @property
    def scheduler(self) -> SchedulerConfig:
        """The part of the configuration that scheduling reads."""
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
    """The config of an engine whose weights a trainer reads or sends: `quantization="auto"` means
    plain weights there, which an update does not round.
    """
    return replace(config, quantization=None) if config.quantization == "auto" else config


def _check_text(config: EngineConfig) -> None:
    for name in ("model_path", "device"):
        _require_text(name, getattr(config, name))
    if re.fullmatch(r"auto|cpu(:0)?|cuda(:\d+)?", config.device) is None:
        raise ConfigError(
            f"device={config.device!r} is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:N'."
        )
    for name in ("tokenizer_path", "ref_model_path", "draft_model", "kept_cache_folder"):
        if getattr(config, name) is not None:
            _require_text(name, getattr(config, name))


def _check_choices(config: EngineConfig) -> None:
    for each in fields(config):
        value: object = getattr(config, each.name)
        allowed = (None, 0, 1) if each.name == "lookahead" else choices(each)
        if allowed and not any(
            type(value) is type(choice) and value == choice for choice in allowed
        ):
            listed = ", ".join(repr(choice) for choice in allowed)
            raise ConfigError(f"{each.name}={value!r} is not available; choose one of {listed}.")


def _check_adapters(config: EngineConfig) -> None:
    names: list[str] = []
    for each in config.loras:
        parts = each.split("=", 1) if isinstance(each, str) else []  # pyright: ignore
        if len(parts) < 2 or not all(parts):
            raise ConfigError(f"loras: {each!r} must be NAME=FOLDER.")
        names.append(parts[0])
    if len({*names}) < len(names):
        raise ConfigError(f"loras={config.loras!r} names an adapter twice.")
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
            f"pipeline_parallel={config.pipeline_parallel}: as many "
            "steps are planned ahead as there are other stages; leave it out."
        )
    if config.expert_parallel not in (1, config.tensor_parallel) and config.tensor_parallel != 1:
        raise ConfigError(
            f"expert_parallel={config.expert_parallel} must be 1 or "
            f"tensor_parallel={config.tensor_parallel}."
        )


def _check_drafts(config: EngineConfig) -> None:
    if config.draft_quantization == "file":
        raise ConfigError(
            f"draft_quantization={config.draft_quantization!r} is not possible: drafts have codes "
            "of plain weights; use 'int8', 'int8-32' or 'int4'."
        )


def _check_context(config: EngineConfig) -> None:
    ranks, unit = config.context_parallel, SEGMENT * config.context_parallel
    if ranks == 1:
        return
    if config.block_size % unit:
        raise ConfigError(
            f"context_parallel={ranks} shares each block out at multiples of {SEGMENT} tokens, so "
            "block_size="
            f"{config.block_size} must be a multiple of {unit}; use "
            f"block_size={-(-config.block_size // unit) * unit}."
        )


def _require_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be a non-empty string, not {value!r}.")


def require_count(name: str, value: Any) -> None:
    """Raise `ConfigError` unless an option is a positive integer."""
    if not is_whole(value, 1):
        raise ConfigError(f"{name}={value!r} must be a positive integer.")
