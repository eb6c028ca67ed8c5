"""`nano-inference generate`: samples of prompts, as text, with coloured tokens, or as JSON
lines.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from nano_inference.cli import options
from nano_inference.cli.coloring import colored, legend
from nano_inference.cli.prompts import Prompt, as_chat, read_prompts, title
from nano_inference.cli.terminal import Interruptible, errors, load_engine, output, printable, write
from nano_inference.config import EngineConfig
from nano_inference.errors import ModelLoadError
from nano_inference.types import SamplingParams, TrainingSample

if TYPE_CHECKING:
    from nano_inference.engine.engine import InferenceEngine


def generate(
    ctx: typer.Context,
    model: options.Model,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt. May be repeated."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help='Prompts, one a line; a .jsonl file has {"prompt": ...} or {"messages": [...]} '
            "in each. "
            "- reads text from standard input.",
        ),
    ] = None,
    num_samples: Annotated[
        int,
        typer.Option(
            "--num-samples",
            "-n",
            min=1,
            help="Samples of each prompt; it is computed once for all.",
        ),
    ] = 1,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            show_default=False,
            help="Put text into the chat template, as the user's message, or let the model "
            "continue it as it is. "
            "Default: the template, if the model has one.",
        ),
    ] = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    max_tokens: options.MaxTokens = 256,
    min_tokens: Annotated[
        int,
        typer.Option(
            help="Do not end a completion before so many tokens.", rich_help_panel="Sampling"
        ),
    ] = 0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ID",
            help="End a completion with this token. May be repeated.",
            rich_help_panel="Sampling",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Go on after the end-of-sequence token.",
            rich_help_panel="Sampling",
        ),
    ] = False,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    generation_config: options.GenerationDefaults = "auto",
    logprobs: Annotated[
        bool,
        typer.Option(
            "--logprobs",
            help="Colour each token by its probability (numbers where there are no colours).",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Write one JSON object a sample to standard output: a TrainingSample."
        ),
    ] = False,
    top_logprobs: Annotated[
        int,
        typer.Option(min=0, help="With --json: also the most probable tokens at every position."),
    ] = 0,
    ref_model: options.RefModel = None,
    tokenizer: options.Tokenizer = None,
    cache_type: options.Cache = "paged",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    kv_cache_memory: options.KVCacheMemory = None,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    tensor_parallel: options.TensorParallel = 1,
    pipeline_parallel: options.PipelineParallel = 1,
    context_parallel: options.ContextParallel = 1,
    expert_parallel: options.ExpertParallel = 1,
    rank_timeout: options.RankTimeout = 60.0,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Sample completions of prompts.

    Completions go to standard output, all else to standard error.
    """
    prompts = _prompts(prompt or [], file)
    if as_json and logprobs:
        raise typer.BadParameter(
            "--logprobs colours text; --json has every logprob anyway. Leave one of them out."
        )
    if top_logprobs and not as_json:
        raise typer.BadParameter("--top-logprobs are not part of the text; add --json.")
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=frozenset(stop_token_id or ()),
        ignore_eos=ignore_eos,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        top_logprobs=top_logprobs,
    )
    config = EngineConfig(
        model,
        ref_model_path=ref_model,
        tokenizer_path=tokenizer,
        cache_type=cache_type,
        dtype=dtype,
        device=device,
        kv_cache_memory=kv_cache_memory,
        max_model_len=max_model_len,
        num_threads=threads,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        context_parallel=context_parallel,
        expert_parallel=expert_parallel,
        rank_timeout=rank_timeout,
    )
    with load_engine(config) as engine:
        params = options.with_recommended(ctx, params, engine.model_folder, generation_config)
        if chat if chat is not None else _has_chat_template(engine):
            prompts = [as_chat(each) for each in prompts]
        # A single text grows before the eyes; of several only whole ones can be read.
        live = (
            len(prompts) * num_samples == 1 and output.is_terminal and not as_json and not logprobs
        )
        run = _sample(engine, prompts, params, num_samples, live=live)
        if as_json:
            from nano_inference.data import json_line  # imports torch

            for sample in run.samples:
                typer.echo(json_line(sample))
        elif logprobs:
            output.print(legend(output), "", sep="\n")
            _show(engine, prompts, num_samples, run.samples, logprobs=True)
        elif not live:
            _show(engine, prompts, num_samples, run.samples, logprobs=False)
        if errors.is_terminal and len(prompts) * num_samples == 1:
            # between the text and the figures; after several samples there is an empty line already
            errors.print()
        errors.print(_figures(engine, run), style="dim")
        if run.stopped:
            errors.print(
                f"Interrupted: {len(run.samples)} of {len(prompts) * num_samples} samples were "
                "finished."
            )
            raise typer.Exit(130)


def _prompts(given: list[str], file: Path | None) -> list[Prompt]:
    if file is not None and str(file) != "-" and not file.is_file():
        raise typer.BadParameter(f"there is no file {file}.", param_hint="--file")
    prompts = [*given, *(read_prompts(file) if file else [])]
    if not prompts:
        raise typer.BadParameter(
            "there is no prompt; give one with -p TEXT, or a file of them with --file."
        )
    return prompts


@dataclass(frozen=True)
class _Run:
    samples: list[TrainingSample]  # prompt by prompt
    seconds: float
    stopped: bool  # by Ctrl-C; the samples are those that had ended


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
    stream = engine.generate(
        prompts, params, num_samples, stream=True, progress=False if live else None
    )
    with Interruptible(stream) as deltas:
        for delta in deltas:
            if live and delta.text:
                write(delta.text)
            if delta.finished is not None:
                samples.append(delta.finished)
    if live:
        write("\n")
    samples.sort(key=lambda sample: (sample.request_id, sample.sample_index))
    return _Run(samples, time.perf_counter() - start, deltas.stopped)


def _has_chat_template(engine: "InferenceEngine") -> bool:
    try:
        return engine.tokenizer.chat_template is not None
    except ModelLoadError:
        return False  # a prompt of text will be refused for it, token ids need none


def _show(
    engine: "InferenceEngine",
    prompts: list[Prompt],
    num_samples: int,
    samples: list[TrainingSample],
    *,
    logprobs: bool,
) -> None:
    """Completions under headings; a single one has none, so that its text can be piped on."""
    headings = len(prompts) * num_samples > 1
    shown = None
    for sample in samples:
        if headings and sample.request_id != shown:
            shown = sample.request_id  # a new engine counts from 0, so it is the prompt's place
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


def _prompt_heading(prompts: list[Prompt], place: int) -> Text:
    count = f" {place + 1} of {len(prompts)}" if len(prompts) > 1 else ""
    return Text.assemble((f"prompt{count}", "bold"), "  ", printable(title(prompts[place])))


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
    """The completion as text, or as ids where there is no tokenizer."""
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
        f"{count} {'sample' if count == 1 else 'samples'}, {tokens:,} tokens in {run.seconds:.1f} "
        "s: "
        f"{tokens / max(run.seconds, 1e-9):,.1f} tok/s; {cached:,} of "
        f"{cached + stats.prompt_tokens_computed:,} prompt "
        "tokens cached"
    )
