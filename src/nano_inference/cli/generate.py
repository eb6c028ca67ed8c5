"""`nano-inference generate`: sample completions as text, colored tokens or JSON lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from nano_inference.cli import options
from nano_inference.cli.field_options import FieldOptions
from nano_inference.cli.help_texts import HelpAll
from nano_inference.cli.prompts import Prompt, as_chat, read_prompts, title
from nano_inference.cli.terminal import (
    Interruptible,
    colored,
    errors,
    legend,
    load_engine,
    output,
    printable,
    read_file,
    write,
)
from nano_inference.config import EngineConfig
from nano_inference.errors import InvalidRequest, ModelLoadError
from nano_inference.structured.grammar import Grammar
from nano_inference.types import ERROR, SamplingParams, TrainingSample

if TYPE_CHECKING:
    from nano_inference.engine.engine import InferenceEngine
_LOCAL_PARAMS = (
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "adapter",
    "receipt",
)  # not sent to a server
_Sampling = Annotated[
    options.Values,
    FieldOptions(
        SamplingParams,
        (*options.PARAMS, *_LOCAL_PARAMS),
        shown=options.AS_RECOMMENDED,
    ),
]
_CONFIG_OPTIONS = (
    "ref_model_path",
    "receipt_key",
    *options.ONE_ENGINE,
    *options.RANKS,
    "rank_timeout",
)
_Engine = Annotated[
    options.Values, FieldOptions(EngineConfig, _CONFIG_OPTIONS, defaults={"dtype": "fast"})
]
_LOCAL_OPTIONS = (
    *("num_samples", "chat", "json_schema", "regex", "choice", "generation_config"),
    *("logprobs", "as_json", "top_logprobs", *_LOCAL_PARAMS, *_CONFIG_OPTIONS),
)


# Limits of sequences per step. The KV cache is sized for this many sequences of the longest length,
# so few samples get a small one. The minimum leaves memory for cached prefixes.
LEAST_AT_ONCE, MOST_AT_ONCE = 4, EngineConfig.max_batch_size


@options.from_fields
def generate(
    ctx: typer.Context,
    *,
    model: options.ModelOrServed = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Continue one text with a model on this server, such as http://127.0.0.1:8000.",
        ),
    ] = None,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", metavar="TEXT", help="Text to answer or continue. May be repeated."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help='Read prompts from a file, one per line; in a .jsonl file, {"prompt": ...} or '
            '{"messages": [...]} per line. -: read standard input. With --url, the whole file is '
            "one prompt; without -p and -f, standard input is the prompt.",
        ),
    ] = None,
    num_samples: Annotated[
        int,
        typer.Option(
            "--num-samples",
            "-n",
            min=1,
            help="Completions per prompt.",
        ),
    ] = 1,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            show_default=False,
            help="Send text as the user's message in the chat template, or continue the plain "
            "text. Default: the template, if the model has one.",
        ),
    ] = None,
    sampling: _Sampling,
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema",
            metavar="FILE|JSON",
            help="Require JSON that follows this schema: a file, or the schema itself.",
        ),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Require completions that match this regular expression as a whole.",
        ),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Require one of these completions. May be repeated."),
    ] = None,
    generation_config: options.GenerationDefaults = "auto",
    logprobs: Annotated[
        bool,
        typer.Option(
            "--logprobs",
            help="Color each token by its probability. Without colors, print its logprob.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write one TrainingSample per line, as JSON."),
    ] = False,
    top_logprobs: Annotated[
        int,
        typer.Option(min=0, help="With --json, add the N most probable tokens at every position."),
    ] = 0,
    engine: _Engine,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    help_all: HelpAll = False,
) -> None:
    """Sample completions of prompts, here or on a server.

    Completions go to standard output, everything else to standard error. With --url, a server's
    model continues one text, which may come from standard input.

    Examples:

    nano-inference generate smollm2-135m -p "The sky is" -n 2 --temperature 0.6
    nano-inference generate smollm2-135m --file prompts.txt --json > samples.jsonl
    nano-inference generate smollm2-135m --chat -p "Name a color." --choice red --choice blue
    nano-inference generate --url http://127.0.0.1:8000 -p "The sky is"
    """
    _check_given(ctx, model, url)
    if url is not None:
        from nano_inference.cli.remote_generate import generate_on
        from nano_inference.system.http_client import HttpClient

        client = HttpClient(url, options.key_of(api_key, api_key_file))
        params = options.checked(SamplingParams, **sampling)
        generate_on(ctx, client, model, prompt or [], file, params)
        return
    model = options.checked_model(model or "")
    prompts = _prompts(prompt or [], file)
    _check_output(as_json, logprobs, top_logprobs, receipt=sampling["receipt"])
    params = options.checked(
        SamplingParams,
        **sampling,
        top_logprobs=top_logprobs,
        grammar=_grammar(json_schema, regex, choice),
    )
    most = min(MOST_AT_ONCE, max(LEAST_AT_ONCE, len(prompts) * num_samples))
    config = options.engine_config(model, engine, max_batch_size=most)
    with load_engine(config) as built:
        params = options.with_recommended(ctx, params, built.model_folder, model, generation_config)
        if chat if chat is not None else has_chat_template(built):
            prompts = [as_chat(each) for each in prompts]
        # a single text is written while it grows, since several would mix
        is_plain = not as_json and not logprobs and has_tokenizer(built)
        live = len(prompts) * num_samples == 1 and is_plain
        run = _sample(built, prompts, params, num_samples, live=live)
        if as_json:
            from nano_inference.data import json_line, sealed

            for sample in sealed(run.samples):
                typer.echo(json_line(sample))
        elif logprobs:
            output.print(legend(output), "", sep="\n")
            _show(built, prompts, num_samples, run.samples, logprobs=True)
        elif not live:
            _show(built, prompts, num_samples, run.samples, logprobs=False)
        if errors.is_terminal and len(prompts) * num_samples == 1:
            # between the text and the figures, since several samples end with an empty line already
            errors.print()
        _show_failures(run.samples)
        errors.print(_figures(built, run), style="dim")
        if run.stopped:
            errors.print(
                f"Interrupted: finished {len(run.samples)} of {len(prompts) * num_samples} samples."
            )
            raise typer.Exit(130)


def _check_given(ctx: typer.Context, model: str | None, url: str | None) -> None:
    """Reject options that would have no effect."""
    if model is None and url is None:
        raise typer.BadParameter("MODEL is missing; try smollm2-135m, or use a server with --url.")
    unused, owner = (
        (("api_key", "api_key_file"), "a server (--url)")
        if url is None
        else (_LOCAL_OPTIONS, "a local engine")
    )
    if (flag := options.first_given(ctx, unused)) is not None:
        raise typer.BadParameter(f"{flag} requires {owner}; leave it out.")


def _check_output(as_json: bool, logprobs: bool, top_logprobs: int, *, receipt: bool) -> None:
    if as_json and logprobs:
        raise typer.BadParameter(
            "--logprobs and --json exclude each other: the JSON has all logprobs; leave one out."
        )
    if top_logprobs and not as_json:
        raise typer.BadParameter("--top-logprobs requires --json.")
    if receipt and not as_json:
        raise typer.BadParameter("--receipt requires --json, which writes receipts.")


def _grammar(schema: str | None, pattern: str | None, choices: list[str] | None) -> Grammar | None:
    """Return the grammar of completions, or None. Raises `InvalidRequest`."""
    values = {"--json-schema": schema, "--regex": pattern, "--choice": choices or None}
    flags = [name for name, value in values.items() if value is not None]
    if len(flags) > 1:
        raise typer.BadParameter(f"{' and '.join(flags)} exclude each other; give one.")
    if schema is not None:
        return _enforceable(_json_schema(schema))
    if pattern is not None:
        return _enforceable(Grammar.regex(pattern))
    return _enforceable(Grammar.choice(choices)) if choices else None


def _enforceable(grammar: Grammar) -> Grammar:
    """Return the grammar. Raises `typer.BadParameter` if no backend can enforce it."""
    from nano_inference.structured.backend import backend_named

    try:
        backend_named("llguidance").check(grammar)
    except InvalidRequest as problem:
        raise typer.BadParameter(str(problem)) from problem
    return grammar


def _json_schema(value: str) -> Grammar:
    """Return the grammar of a schema, from JSON or the name of a file. Raises `InvalidRequest`."""
    where, text = "--json-schema", value
    if not value.lstrip().startswith(("{", "true", "false")):
        where, file = value, Path(value)
        if not file.is_file():
            raise typer.BadParameter(f"{value}: no such file.", param_hint="--json-schema")
        text = read_file(file)
    try:
        return Grammar.json_schema(text)
    except InvalidRequest as problem:
        raise InvalidRequest(f"{where}: {problem}") from problem


def _prompts(texts: list[str], file: Path | None) -> list[Prompt]:
    if file is not None and str(file) != "-" and not file.is_file():
        raise typer.BadParameter(f"{file}: no such file.", param_hint="--file")
    prompts = [*texts, *(read_prompts(file) if file else [])]
    if not prompts:
        raise typer.BadParameter(
            "the prompt is missing; give one with -p TEXT, or a file with --file."
        )
    return prompts


@dataclass(frozen=True)
class _Run:
    samples: list[TrainingSample]  # finished samples, ordered by prompt
    seconds: float
    stopped: bool  # by Ctrl-C


def _sample(
    engine: "InferenceEngine",
    prompts: list[Any],
    params: SamplingParams,
    num_samples: int,
    *,
    live: bool,
) -> _Run:
    samples: list[TrainingSample] = []
    start = time.perf_counter()
    is_seen = live and output.is_terminal  # the growing text shows the progress
    with (
        _progress_line(is_seen) as report,
        Interruptible(
            engine.generate(prompts, params, num_samples, stream=True, progress=report)
        ) as deltas,
    ):
        for delta in deltas:
            if live and delta.text:
                write(delta.text)
            if delta.finished is not None:
                samples.append(delta.finished)
    if live:
        write("\n")
    samples.sort(key=lambda sample: (sample.request_id, sample.sample_index))
    return _Run(samples, time.perf_counter() - start, deltas.stopped)


@contextmanager
def _progress_line(is_seen: bool) -> Iterator[Callable[[int, int, int], None] | bool]:
    """Yield the `progress` argument of `InferenceEngine.generate`: a function that updates a line
    of the terminal. Yield False if there is no terminal, or if the text is visible.
    """
    if is_seen or not errors.is_terminal:
        yield False
        return
    start = time.perf_counter()
    with errors.status("sampling") as status:

        def report(finished: int, total: int, tokens: int) -> None:
            status.update(Text(_progress(finished, total, tokens, time.perf_counter() - start)))

        yield report


def _progress(finished: int, total: int, tokens: int, seconds: float) -> str:
    samples = "" if total == 1 else f"{finished} of {total} samples, "
    return f"{samples}{tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tok/s"


def has_tokenizer(engine: "InferenceEngine") -> bool:
    """Return True if the engine has a tokenizer."""
    try:
        return engine.tokenizer is not None
    except ModelLoadError:
        return False


def has_chat_template(engine: "InferenceEngine") -> bool:
    """Return True if the engine has a tokenizer with a chat template."""
    return has_tokenizer(engine) and engine.tokenizer.chat_template is not None


def _show(
    engine: "InferenceEngine",
    prompts: list[Prompt],
    num_samples: int,
    samples: list[TrainingSample],
    *,
    logprobs: bool,
) -> None:
    """Write completions under headings. A single completion has none, for pipes."""
    headings = len(prompts) * num_samples > 1
    shown = None
    for sample in samples:
        if headings and sample.request_id != shown:
            shown = sample.request_id  # the prompt's index: a new engine counts from 0
            output.print(_prompt_heading(prompts, shown), no_wrap=True, overflow="ellipsis")
            output.print()
        if headings:
            output.print(_heading(sample))
        if logprobs:
            output.print(
                colored(sample, engine.tokenizer, output), soft_wrap=not output.is_terminal
            )
        else:
            write(_text(engine, sample) + "\n")
        if headings:
            output.print()


def _show_failures(samples: list[TrainingSample]) -> None:
    """Print every reason why samples failed, once."""
    for reason in sorted({str(each.stop_reason) for each in samples}):
        if reason.startswith(ERROR):
            errors.print(Text(reason, style="red"), soft_wrap=True)


def _prompt_heading(prompts: list[Prompt], index: int) -> Text:
    count = f" {index + 1} of {len(prompts)}" if len(prompts) > 1 else ""
    return Text.assemble((f"prompt{count}", "bold"), "  ", printable(title(prompts[index])))


def _heading(sample: TrainingSample) -> Text:
    facts = [
        f"{len(sample.completion_tokens)} tokens",
        sample.finish_reason,
        f"mean logprob {_mean(sample.logprobs)}",
    ]
    if sample.ref_logprobs is not None:
        facts.append(f"reference {_mean(sample.ref_logprobs)}")
    return Text.assemble(
        (f"sample {sample.sample_index + 1}", "cyan"), ("  " + ", ".join(facts), "dim")
    )


def _mean(numbers: tuple[float, ...]) -> str:
    return f"{sum(numbers) / max(len(numbers), 1):.2f}"


def _text(engine: "InferenceEngine", sample: TrainingSample) -> str:
    """Return the completion as text, or as ids if there is no tokenizer."""
    if sample.text is not None:
        return sample.text
    try:
        return engine.tokenizer.decode(sample.completion_tokens)
    except ModelLoadError:
        return " ".join(map(str, sample.completion_tokens))


def _figures(engine: "InferenceEngine", run: _Run) -> str:
    stats = engine.stats()
    tokens, cached = stats.completion_tokens, stats.prompt_tokens_cached
    count = len(run.samples)
    return (
        f"{count} {'sample' if count == 1 else 'samples'}, "
        f"{tokens:,} tokens in {run.seconds:.1f} s: "
        f"{tokens / max(run.seconds, 1e-9):,.1f} tok/s; {cached:,} of "
        f"{cached + stats.prompt_tokens_computed:,} prompt tokens cached"
    )
