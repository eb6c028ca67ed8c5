"""Options that several commands share, as annotated types, and the configuration that they make."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nano_inference.cli.terminal import errors, set_up_logging
from nano_inference.config import CacheType, DType
from nano_inference.errors import ConfigError
from nano_inference.models.generation_defaults import GenerationConfig, as_text, generation_defaults
from nano_inference.types import SamplingParams

DEBUG = "nano_inference.debug"  # where a context keeps whether tracebacks are wanted

_UNITS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)},
}


def parse_size(text: str | int) -> int:
    """Bytes that `512MiB`, `2GB` or `1.5 GiB` mean. Raises `typer.BadParameter`."""
    parts = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    if parts is None or parts[2] not in _UNITS:
        raise typer.BadParameter(
            f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB."
        )
    return int(float(parts[1]) * _UNITS[parts[2]])


def read_keys(file: Path) -> list[str]:
    """The keys of a file, one a line; empty lines are passed over. Raises `ConfigError`."""
    try:
        keys = [
            line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"the keys in {file} cannot be read: {problem}") from None
    if not keys:
        raise ConfigError(f"{file} holds no key; write one a line.")
    return keys


def read_template(file: Path) -> str:
    """A chat template. Raises `ConfigError`."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"the chat template in {file} cannot be read: {problem}") from None


def _note_debug(ctx: typer.Context, debug: bool) -> bool:
    ctx.meta[DEBUG] = debug
    return debug


def _note_verbose(verbose: bool) -> bool:
    if verbose:
        set_up_logging(verbose=True)
    return verbose


def _embedded_names() -> list[str]:
    from nano_inference.models.embedded import EMBEDDED_MODELS

    return sorted(EMBEDDED_MODELS)


def option(panel: str, *names: str, **settings: Any) -> Any:
    """An option that help lists in this panel."""
    return typer.Option(*names, rich_help_panel=panel, **settings)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        autocompletion=_embedded_names,
        help="A Hugging Face folder, a hub id, a .gguf file, or a model that a package carries: "
        "smollm2-135m.",
    ),
]

ServedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        show_default=False,
        help="The model's name there. Default: the first that it serves.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", help="The server's key. Others can see it with `ps`."),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", help="The server's key is in this file.")
]

_ENGINE = "The engine"
Tokenizer = Annotated[
    str | None,
    option(
        _ENGINE, "--tokenizer", help="Take tokenizer and chat template from this folder or hub id."
    ),
]
RefModel = Annotated[
    str | None,
    option(_ENGINE, "--ref-model", help="A frozen model that scores every sample: ref_logprobs."),
]
Cache = Annotated[
    CacheType, option(_ENGINE, "--cache-type", help="How cached prefixes are indexed.")
]
Dtype = Annotated[
    DType, option(_ENGINE, "--dtype", help="Of weights and KV cache. auto: the checkpoint's.")
]
Device = Annotated[
    str, option(_ENGINE, "--device", help="cpu, cuda, cuda:1 … auto: cuda if there is one.")
]
KVCacheMemory = Annotated[
    int | None,
    option(
        _ENGINE,
        "--kv-cache-memory",
        parser=parse_size,
        metavar="SIZE",
        help="Memory of the KV cache, such as 512MiB or 2GiB.",
    ),
]
MaxModelLen = Annotated[
    int | None, option(_ENGINE, "--max-model-len", help="Tokens of prompt and completion together.")
]
Threads = Annotated[
    int | None,
    option(
        _ENGINE, "--threads", help="Threads of the CPU operations. Default: the physical cores."
    ),
]

BlockSize = Annotated[int, option(_ENGINE, "--block-size", help="Tokens in a KV block.")]

_RANKS = "Several processes"
TensorParallel = Annotated[
    int,
    option(
        _RANKS,
        "--tensor-parallel",
        help="Processes that share every layer of the model: 1, 2, 4, 8 …",
    ),
]
PipelineParallel = Annotated[
    int,
    option(_RANKS, "--pipeline-parallel", help="Stages, each a process with layers of its own."),
]
ContextParallel = Annotated[
    int,
    option(
        _RANKS,
        "--context-parallel",
        help="Processes that share the KV cache of every sequence: 1, 2, 4 …",
    ),
]
ExpertParallel = Annotated[
    int,
    option(
        _RANKS, "--expert-parallel", help="Processes over which a mixture's experts are spread."
    ),
]
RankTimeout = Annotated[
    float,
    option(
        _RANKS, "--rank-timeout", help="Seconds that one of them may take for what others wait for."
    ),
]

_SAMPLING = "Sampling"
Temperature = Annotated[
    float,
    option(
        _SAMPLING,
        "--temperature",
        "-t",
        help="0 always takes the most likely token; 1 samples as trained.",
    ),
]
TopP = Annotated[
    float,
    option(_SAMPLING, "--top-p", help="Keep the likeliest tokens with this much mass; 1: all."),
]
TopK = Annotated[
    int, option(_SAMPLING, "--top-k", help="Keep this many of the likeliest tokens; 0: all.")
]
MinP = Annotated[
    float,
    option(
        _SAMPLING,
        "--min-p",
        help="Keep tokens at least this likely, relative to the likeliest; 0: all.",
    ),
]
MaxTokens = Annotated[
    int, option(_SAMPLING, "--max-tokens", "-m", help="End a completion after so many tokens.")
]
Seed = Annotated[
    int | None,
    option(_SAMPLING, "--seed", help="The same seed gives the same samples. Default: a fresh one."),
]
Stop = Annotated[
    list[str] | None,
    option(
        _SAMPLING,
        "--stop",
        metavar="TEXT",
        help="End a completion before this text. May be repeated.",
    ),
]
PresencePenalty = Annotated[
    float,
    option(
        _SAMPLING,
        "--presence-penalty",
        help="Taken off the logits of tokens already in the completion.",
    ),
]
FrequencyPenalty = Annotated[
    float,
    option(_SAMPLING, "--frequency-penalty", help="The same, times how often they are in it."),
]
RepetitionPenalty = Annotated[
    float,
    option(
        _SAMPLING,
        "--repetition-penalty",
        help="Above 1 disfavours tokens of prompt and completion.",
    ),
]

GenerationDefaults = Annotated[
    GenerationConfig,
    option(
        _SAMPLING,
        "--generation-config",
        help="auto: what is not given here is as the model's generation_config.json recommends.",
    ),
]


def with_recommended(
    ctx: typer.Context, params: SamplingParams, folder: Path, use: GenerationConfig
) -> SamplingParams:
    """Parameters, of which those that the command line left out are as the model recommends."""
    found = generation_defaults(folder) if use == "auto" else {}
    left_out = {name: value for name, value in found.items() if not _is_given(ctx, name)}
    if left_out:
        errors.print(f"sampling as the model recommends: {as_text(left_out)}", style="dim")
    return replace(params, **left_out)


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


_MESSAGES = "Messages"
Verbose = Annotated[
    bool,
    option(
        _MESSAGES, "--verbose", "-v", callback=_note_verbose, help="Also show what the engine logs."
    ),
]
Debug = Annotated[
    bool,
    option(_MESSAGES, "--debug", callback=_note_debug, help="Show an error with its traceback."),
]


def key_of(key: str | None, file: Path | None) -> str | None:
    """The key to send: as given, or the first of a file. Raises `ConfigError`."""
    return read_keys(file)[0] if file is not None and key is None else key


def request_body(params: SamplingParams) -> dict[str, Any]:
    """Parameters as fields of a request. Only what differs from the defaults: other servers do not
    know them all.
    """
    default = SamplingParams()
    fields = {
        name: getattr(params, name)
        for name in _SENT
        if getattr(params, name) != getattr(default, name)
    }
    if params.stop:
        fields["stop"] = list(params.stop)
    return {"temperature": params.temperature, "max_tokens": params.max_tokens} | fields


_SENT = (
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)
