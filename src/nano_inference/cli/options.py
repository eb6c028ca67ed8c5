"""Command options: made from configuration fields, or shared as annotated types."""

import importlib.util
import inspect
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from nano_inference.checkpoints.embedded import EMBEDDED_MODELS, find_embedded, install_command
from nano_inference.checkpoints.generation_defaults import (
    AUTO,
    NONE,
    UNRECOMMENDED,
    as_text,
    check_generation_config,
    defaults_for_people,
    generation_defaults,
)
from nano_inference.checkpoints.names import plain_name, why_missing
from nano_inference.cli.field_options import FieldOptions, Values
from nano_inference.cli.messages import Debug as Debug
from nano_inference.cli.messages import Verbose as Verbose
from nano_inference.cli.terminal import errors, read_file
from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError, ModelLoadError, NanoInferenceError
from nano_inference.types import SAMPLING, SamplingParams

Made = TypeVar("Made")


def read_keys(file: Path) -> list[str]:
    """Return the keys in a file, one per line, without empty lines. Raises `ConfigError` if there
    are none, `InvalidRequest` if the file cannot be read.
    """
    lines = read_file(file).splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{file} has no keys; write one per line.")
    return keys


def read_template(file: Path) -> str:
    """Return the chat template in a file. Raises `InvalidRequest`."""
    return read_file(file)


def require_packages(names: Iterable[str], what: str, model: str, extra: str) -> None:
    """Raise `ConfigError` if packages that `what` requires are missing, with the command that
    installs the extra.
    """
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        raise ConfigError(
            f"{what} requires {', '.join(missing)}, not installed here; run: "
            f"{install_command(model, extra)}"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent such as `google` is missing
        return False


def from_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose `FieldOptions` parameters are expanded to one option per field, and
    whose `AlsoOption` argument has a second form `--model`.
    """
    marked: dict[str, FieldOptions] = {}
    named: dict[str, AlsoOption] = {}  # parameters that are arguments and options
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        for mark in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(mark, FieldOptions):
                marked[parameter.name] = mark
                parameters += mark.parameters()
            elif isinstance(mark, AlsoOption):
                named[parameter.name] = mark
                parameters += mark.parameters(parameter)
        if parameter.name not in marked and parameter.name not in named:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**values: Any) -> None:
        configs = {name: mark.take(values) for name, mark in marked.items()}
        for name, also in named.items():
            argument, option = values.pop(name), values.pop(MODEL_OPTION)
            required = also.required and also.missing_is_wrong
            values[name] = _one_model(argument, option, required)
        command(**values, **configs)

    # typer reads these two
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__dict__["flags"] = {
        name: pair for mark in marked.values() for name, pair in mark.flags().items()
    }
    return run


MODEL_OPTION = "model_option"


@dataclass(frozen=True)
class AlsoOption:
    """Mark for the argument MODEL, which may also be an option `--model`.

    Attributes:
        flags: Flags of the option.
        required: True if MODEL names a model on this machine. False: it may be a server's name.
        missing_is_wrong: True if MODEL must be present. False: the command checks that itself.
        many: True for several models. The command gets a list.
    """

    flags: tuple[str, ...] = ("--model",)
    required: bool = True
    missing_is_wrong: bool = True
    many: bool = False

    def parameters(self, argument: inspect.Parameter) -> list[inspect.Parameter]:
        """Return the argument and the option, as typer reads them."""
        (info_of_argument,) = (
            each for each in argument.annotation.__metadata__ if not isinstance(each, AlsoOption)
        )
        option = typer.Option(
            *self.flags,
            metavar="MODEL",
            show_default=False,
            callback=(_checked_arguments if self.many else _checked_argument)
            if self.required
            else None,
            autocompletion=_embedded_names,
            help="Same as MODEL. May be repeated." if self.many else "Same as MODEL.",
        )
        kind: Any = list[str] | None if self.many else str | None
        return [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind, info],
            )
            for name, info in ((argument.name, info_of_argument), (MODEL_OPTION, option))
        ]


Named = TypeVar("Named", str, list[str])


def _one_model(argument: Named | None, option: Named | None, required: bool) -> Named | None:
    if argument and option:
        raise typer.BadParameter(f"MODEL is {argument} and --model is {option}; give one.")
    model = option if option else argument
    if not model and required:
        raise typer.BadParameter("MODEL is missing; try smollm2-135m.")
    return model


ONE_ENGINE = (
    *("tokenizer_path", "cache_type", "dtype", "quantization", "device", "kv_cache_memory"),
    *(
        "kv_cache_dtype",
        "cpu_sums",
        "max_model_len",
        "num_threads",
        "speculation",
        "draft_model",
        "draft_layers",
    ),
    *("draft_quantization", "max_drafts", "loras", "max_lora_rank"),
)
RANKS = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
PARAMS = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


# texts of sampling defaults: for a local model, and for a server
AS_RECOMMENDED = {
    "temperature": f"as the model recommends, else {UNRECOMMENDED['temperature']}",
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"), "as the model recommends"),
}
AS_THE_SERVER = dict.fromkeys(AS_RECOMMENDED, "the server's")
Sampling = Annotated[Values, FieldOptions(SamplingParams, PARAMS, shown=AS_THE_SERVER)]


# -- other options -------------------------------------------------------------------------------


def _checked_defaults(use: str) -> str:
    try:
        check_generation_config(use)
    except ConfigError as problem:
        raise typer.BadParameter(str(problem)) from problem
    return use


def _embedded_names() -> list[str]:
    return sorted(EMBEDDED_MODELS)


def checked_model(model: str) -> str:
    """Return a model's normalized name. Raises `typer.BadParameter` for a missing path."""
    if (why := why_missing(name := plain_name(model))) is not None:
        raise typer.BadParameter(f"{why}.")
    return name


def _checked_argument(ctx: typer.Context, model: str | None) -> str | None:
    return model if model is None or ctx.resilient_parsing else checked_model(model)


def require_model(model: str) -> None:
    """Raise `typer.BadParameter` for a name that neither a package nor the hub knows, and
    `ModelLoadError` for a model whose package is missing. Does not import torch.
    """
    if model in EMBEDDED_MODELS:
        find_embedded(model)
    elif not Path(model).expanduser().exists():
        from nano_inference.checkpoints.folders import describe_model

        try:
            describe_model(model)
        except ModelLoadError as problem:
            raise typer.BadParameter(str(problem)) from problem


def require_device(device: str) -> None:
    """Raise `typer.BadParameter` for CUDA if the installed torch has no CUDA."""
    if not device.startswith("cuda"):
        return
    import importlib.metadata  # slow to import

    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    if version.endswith("+cpu"):
        raise typer.BadParameter(
            f"--device {device} requires torch with CUDA; torch {version} is for CPUs."
        )


def engine_config(model: str, values: Values, **more: Any) -> EngineConfig:
    """Return the engine's configuration for a model, checked as far as possible without torch.

    Raises:
        typer.BadParameter: An option is wrong, or the model does not exist.
        ModelLoadError: The model's package is missing.
    """
    config = checked(EngineConfig, model, **values, **more)
    require_device(config.device)
    for name in ("tokenizer_path", "ref_model_path", "draft_model"):
        path = getattr(config, name)
        if path is not None and (why := why_missing(path)) is not None:
            raise typer.BadParameter(f"{why}.")
    require_model(model)
    return config


def checked(make: Callable[..., Made], *arguments: Any, **values: Any) -> Made:
    """Return `make(...)`. Raises `typer.BadParameter` for a value that it rejects."""
    try:
        return make(*arguments, **values)
    except NanoInferenceError as problem:
        raise typer.BadParameter(str(problem)) from problem


def _checked_arguments(ctx: typer.Context, models: list[str] | None) -> list[str] | None:
    return models if not models or ctx.resilient_parsing else [*map(checked_model, models)]


_MODEL_ARGUMENT = typer.Argument(
    metavar="MODEL",
    show_default=False,
    autocompletion=_embedded_names,
    callback=_checked_argument,
    help="Model to load: a Hugging Face folder, a hub id, a .gguf file, or smollm2-135m.",
)
Model = Annotated[str, _MODEL_ARGUMENT]
# other engines call the argument --model
OneModel = Annotated[str, _MODEL_ARGUMENT, AlsoOption()]
MaybeModel = Annotated[str | None, _MODEL_ARGUMENT, AlsoOption(missing_is_wrong=False)]
ModelsToServe = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        show_default=False,
        autocompletion=_embedded_names,
        callback=_checked_arguments,
        help="Models to serve: Hugging Face folders, hub ids, .gguf files, or smollm2-135m.",
    ),
    AlsoOption(("--model", "-m"), many=True),
]
ModelOrServed = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        show_default=False,
        help="Model to load: a Hugging Face folder, a hub id, a .gguf file, or smollm2-135m. With "
        "--url, the model's name on the server (default: the first that it lists).",
    ),
    AlsoOption(required=False),
]
ServedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        show_default=False,
        help="Model to request. Default: the first that the server lists.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", metavar="KEY", help="Key of the server. Other users can see it with `ps`."
    ),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", help="Read the server's key from this file.")
]
GenerationDefaults = Annotated[
    str,
    typer.Option(
        "--generation-config",
        metavar="auto|none|FOLDER",
        rich_help_panel=SAMPLING,
        callback=_checked_defaults,
        help="Source of sampling options that you leave out. auto: the model's "
        "generation_config.json; none: temperature 1, no filters; FOLDER: the file in that folder.",
    ),
]


def with_recommended(
    ctx: typer.Context, params: SamplingParams, folder: Path, model: str, use: str
) -> SamplingParams:
    """Return the parameters with recommended values in place of options that you left out.

    Args:
        ctx: Context of the command, which has the options that you set.
        params: Parameters from the command line.
        folder: Folder of the model.
        model: Name of the model.
        use: Source of the recommendations: `auto`, `none` or a folder.
    """
    recommended = (
        generation_defaults(folder, model)
        if use in (AUTO, NONE)
        else generation_defaults(Path(use))
    )
    defaults = defaults_for_people(use, recommended)
    left_out = {name: value for name, value in defaults.items() if not is_given(ctx, name)}
    if left_out:
        source = "the model" if use == AUTO else use
        how = f"as {source} recommends" if recommended else f"({source} recommends no values)"
        errors.print(f"sampling {how}: {as_text(left_out)}", style="dim")
    return replace(params, **left_out)


def is_given(ctx: typer.Context, name: str) -> bool:
    """Return True if an option is set, on the command line or by an environment variable."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def first_given(ctx: typer.Context, names: Container[str | None]) -> str | None:
    """Return the flag of the first of these options that is set, or None."""
    flags = (
        each.opts[0]
        for each in ctx.command.params
        if each.name is not None and each.name in names and is_given(ctx, each.name)
    )
    return next(flags, None)


def key_of(key: str | None, file: Path | None) -> str | None:
    """Return the key to send: `key`, or the first one in a file. Raises `ConfigError`."""
    return read_keys(file)[0] if file is not None and key is None else key


def request_body(chosen: Container[str], params: SamplingParams) -> dict[str, Any]:
    """Return `max_tokens` and the parameters that the user set as fields of a request. The server
    decides the others, and some servers reject fields that they do not know.
    """
    return {
        name: getattr(params, name) for name in PARAMS if name == "max_tokens" or name in chosen
    }
