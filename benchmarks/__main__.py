"""`python -m benchmarks COMMAND`: measure the engine. Use a quiet machine. Every report describes
its machine.
"""

import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.measure import write
from benchmarks.ours import Options
from benchmarks.workloads import BASE, NAMES

app = typer.Typer(
    help=__doc__, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)

ALL, THE_SIX = ",".join(NAMES), ",".join(BASE)
Model = Annotated[
    str,
    typer.Option(help="Path or name that the engine accepts, or a name in benchmarks/models.py."),
]
Workloads = Annotated[
    str, typer.Option(help=f"Workloads, separated by commas: {', '.join(NAMES)}.")
]
Repeats = Annotated[int, typer.Option(help="Timed runs per measurement.", min=1)]
Threads = Annotated[
    int | None, typer.Option(help="Threads of the engine. Default: its own choice.", min=1)
]
Backend = Annotated[str, typer.Option(help="Backend of the engine.")]
DType = Annotated[str, typer.Option(help="Dtype of weights and KV cache.")]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Write the report to this file. Default: benchmarks/results/COMMAND[-MODEL].json."
    ),
]


def names(text: str, known: tuple[str, ...], separator: str = ",") -> tuple[str, ...]:
    """Split a list of names and reject unknown ones."""
    found = tuple(name.strip() for name in text.split(separator) if name.strip())
    unknown = [name for name in found if name not in known]
    if unknown or not found:
        raise typer.BadParameter(
            f"{text!r} contains {unknown or 'no names'}; known names: {'; '.join(known)}."
        )
    return found


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",") if number.strip())
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers separated by commas."
        ) from None


@app.command()
def throughput(
    model: Model = "smollm2-135m",
    workloads: Workloads = ALL,
    repeats: Repeats = 3,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure tokens per second on the workloads; W1 and W2 also with one thread."""
    from benchmarks.throughput import measure

    options = Options(model, dtype, backend, threads, repeats)
    write("throughput", measure(options, names(workloads, NAMES)), asdict(options), out, model)


@app.command()
def latency(
    model: Model = "smollm2-135m",
    workloads: Workloads = "W1,W3",
    repeats: Repeats = 3,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure first token, gaps between tokens, cold start and memory."""
    from benchmarks.latency import measure

    options = Options(model, dtype, backend, threads, repeats)
    write("latency", measure(options, names(workloads, NAMES)), asdict(options), out, model)


@app.command()
def prefill(
    model: Model = "smollm2-135m",
    workloads: Workloads = "W5",
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens. W4 has 4096.")
    ] = "128,512,1024,2048,4096",
    chunks: Annotated[
        str, typer.Option(help="Chunk sizes for the longest prompt in tokens.")
    ] = "128,256,512,1024,2048",
    repeats: Repeats = 3,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure prompts by length and by chunk size, and a shared prefix."""
    from benchmarks.prefill import measure

    options = Options(model, dtype, backend, threads, repeats)
    rows = measure(
        options, numbers(lengths), numbers(chunks), names(workloads, NAMES) if workloads else ()
    )
    write("prefill", rows, asdict(options), out, model)


@app.command()
def formats(
    model: Model = "smollm2-135m",
    dtype: DType = "bfloat16",
    repeats: Repeats = 5,
    kinds: Annotated[
        str, typer.Option(help="Formats, separated by commas: none, int8, int8-32, int4, file.")
    ] = "none,int8,int8-32,int4,file",
    parts: Annotated[
        str,
        typer.Option(help="Parts, separated by commas. own: --kinds. peers: against llama.cpp."),
    ] = "own,peers",
    files: Annotated[
        str,
        typer.Option(
            help="Files for llama.cpp: BF16, Q8_0, Q4_1, Q4_0, Q4_K_M, IQ4_XS, MXFP4_MOE."
        ),
    ] = "BF16,Q8_0,Q4_1,Q4_0,Q4_K_M",
    workloads: Annotated[
        str, typer.Option(help="Workloads against llama.cpp: W1, W4-512, W4, W2.")
    ] = "W1,W4-512,W2",
    threads: Annotated[
        int | None, typer.Option(help="Threads against llama.cpp. Default: one per core.", min=1)
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of `make peers`.")] = None,
    out: Out = None,
) -> None:
    """Measure weights in 8 and 4 bits in turns: speed, memory and quality, also against llama.cpp
    on the same files.
    """
    from benchmarks.formats import KINDS, measure
    from benchmarks.peers import file_formats, install

    chosen = names(parts, ("own", "peers"))
    known = {str(kind or "none"): kind for kind in KINDS}
    asked = names(kinds, tuple(known))
    sizes = file_formats.Sizes(
        names(files, file_formats.KINDS),
        names(workloads, file_formats.WORKLOADS),
        cache or install.CACHE,
    )
    rows = []
    if "own" in chosen:
        rows += measure(model, dtype, repeats, tuple(known[name] for name in asked))
    if "peers" in chosen:
        # stops the engines at the end
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        rows += file_formats.measure(Options(model, dtype, "auto", threads, repeats), sizes)
    write("formats", rows, {"model": model, "dtype": dtype, "repeats": repeats}, out, model)


@app.command()
def adapters(
    model: Model = "smollm2-135m",
    repeats: Repeats = 5,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure rows with and without adapters, and adapter updates, in turns."""
    from benchmarks.adapters import measure

    options = Options(model, dtype, backend, threads, repeats)
    write("adapters", measure(options), asdict(options), out, model)


@app.command()
def start(
    model: Model = "smollm2-135m",
    files: Annotated[str, typer.Option(help="Files: BF16, Q8_0, Q4_1, Q4_0, Q4_K_M.")] = (
        "Q4_0,Q4_K_M,Q8_0"
    ),
    repeats: Repeats = 9,
    threads: Threads = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of `make peers`.")] = None,
    out: Out = None,
) -> None:
    """Measure commands that answer with one token, in turns with llama.cpp: seconds and memory."""
    from benchmarks.peers import file_formats, install
    from benchmarks.start import measure

    options = Options(model, "auto", "auto", threads, repeats)
    kinds = names(files, file_formats.KINDS)
    write("start", measure(options, kinds, cache or install.CACHE), asdict(options), out, model)


@app.command()
def training(
    model: Model = "smollm2-135m",
    peers: Annotated[str, typer.Option(help="Dtypes of transformers.")] = "float32,bfloat16",
    repeats: Repeats = 3,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure a trainer's step in turns: our policies and transformers on the same tokens."""
    from benchmarks.training import measure

    options = Options(model, dtype, backend, threads, repeats)
    asked = names(peers, ("float32", "bfloat16")) if peers else ()
    write("training", measure(options, asked), asdict(options), out, model)


@app.command()
def training_memory(
    model: Model = "smollm2-135m",
    lengths: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "1024,4096",
    peers: Annotated[str, typer.Option(help="Dtypes of transformers.")] = "float32",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure the peak memory of a trainer's step on one long sequence."""
    from benchmarks.training_memory import measure

    options = Options(model, dtype, "auto", None, 1)
    asked = names(peers, ("float32", "bfloat16")) if peers else ()
    tokens = tuple(int(part) for part in lengths.split(","))
    write("training_memory", measure(options, tokens, asked), asdict(options), out, model)


@app.command()
def trees(
    model: Model = "smollm2-135m",
    repeats: Repeats = 3,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure a trainer's step on a tree of ten branches, beside flat sequences."""
    from benchmarks.trees import measure

    options = Options(model, dtype, backend, threads, repeats)
    write("trees", measure(options), asdict(options), out, model)


@app.command()
def kv_cache(
    model: Model = "smollm2-135m",
    dtype: DType = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Timed rounds. 0: no timing.")] = 3,
    out: Out = None,
) -> None:
    """Measure keys and values in 8 bits in turns: capacity, quality, and speed after
    long contexts.
    """
    from benchmarks.formats import measure_caches

    rows = measure_caches(model, dtype, repeats)
    write("kv_cache", rows, {"model": model, "dtype": dtype, "repeats": repeats}, out, model)


@app.command()
def host(out: Out = None) -> None:
    """Measure the host time of a step, with a model that does nothing."""
    from benchmarks import host as null_model  # pyright: ignore

    rows = null_model.measure()
    print(null_model.table(rows))
    named = [{"name": f"{row.case}, {row.running} sequences"} | asdict(row) for row in rows]
    write(
        "host",
        named,
        {"block_size": null_model.BLOCK_SIZE, "prompt_tokens": null_model.PROMPT},
        out,
    )


@app.command()
def ranks(out: Out = None) -> None:
    """Measure the cost of sending a step to another rank, with a model that does nothing."""
    from benchmarks.ranks import measure

    write("ranks", measure(), {"block_size": 16, "prompt_tokens": 256}, out)


@app.command()
def roofline(
    model: Model = "smollm2-135m",
    workloads: Workloads = THE_SIX,
    repeats: Repeats = 3,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    run: Annotated[
        bool, typer.Option(help="Also time the workloads, for their share of the bound.")
    ] = True,
    out: Out = None,
) -> None:
    """Compute each workload's minimum time at this machine's rates, and the engine's
    share of it.
    """
    from benchmarks.roofline import measure

    options = Options(model, dtype, backend, threads, repeats)
    write(
        "roofline", measure(options, names(workloads, NAMES), run=run), asdict(options), out, model
    )


@app.command()
def rl(
    model: Model = "smollm2-135m",
    parts: Annotated[
        str, typer.Option(help="Parts, separated by commas.")
    ] = "update,policies,broadcast,score,abort,gradients",
    repeats: Repeats = 5,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure weight updates against a copy of their bytes, scores, abort and gradients."""
    from benchmarks.rl import PARTS, measure

    options = Options(model, dtype, backend, threads, repeats)
    write("rl", measure(options, names(parts, tuple(PARTS))), asdict(options), out, model)


@app.command()
def receipts(
    model: Model = "smollm2-135m",
    repeats: Repeats = 5,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure the verification of receipts against a prefill of the same tokens, and their cost."""
    from benchmarks.receipts import measure

    options = Options(model, dtype, backend, threads, repeats)
    write("receipts", measure(options), asdict(options), out, model)


@app.command()
def mismatch(
    model: Model = "smollm2-135m",
    tokens: Annotated[
        int, typer.Option(help="Completion tokens of each of 32 samples.", min=1)
    ] = 256,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the picture to this file. Default: docs/rl-mismatch.png."),
    ] = None,
    out: Out = None,
) -> None:
    """Compare the engine's logprobs with those of transformers and of our trainer (needs
    transformers, matplotlib).
    """
    from benchmarks.mismatch import measure

    options = Options(model, dtype, backend, threads, 1)
    write(
        "mismatch",
        measure(options, tokens, picture),
        asdict(options) | {"tokens": tokens},
        out,
        model,
    )


@app.command()
def peers(
    model: Model = "smollm2-135m",
    workloads: Workloads = "W1,W2,W3,W4,W5",
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats", "--rounds", help="Rounds. Each engine runs once per round.", min=1
        ),
    ] = 3,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    engines: Annotated[
        str, typer.Option(help="Engines to measure. transformers is available too.")
    ] = "nano-inference,vllm,llama.cpp",
    vllm: Annotated[
        str, typer.Option(help="Settings of vLLM, separated by semicolons, or all.")
    ] = "",
    llama: Annotated[
        str, typer.Option(help="Settings of llama.cpp, separated by semicolons, or all.")
    ] = "",
    transformers: Annotated[
        str, typer.Option(help="Settings of transformers, separated by semicolons, or all.")
    ] = "",
    limit: Annotated[
        float,
        typer.Option(
            help="Skip the remaining rounds of an engine after a round of this many seconds."
        ),
    ] = 60.0,
    cache: Annotated[Path | None, typer.Option(help="Folder of `make peers`.")] = None,
    out: Out = None,
) -> None:
    """Measure the engine and the installed peers in turns, with ratios to each peer's
    best setting.
    """
    from benchmarks.peers import compare, install, llama_cpp, transformers_cpu, vllm_cpu

    # stops the engines at the end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = Options(model, dtype, backend, threads, repeats)
    choice = compare.Choice(
        engines=names(engines, (compare.OURS, *compare.PEERS)),
        vllm=settings(vllm, tuple(vllm_cpu.SETTINGS)),
        llama=settings(llama, tuple(llama_cpp.SETTINGS)),
        transformers=settings(transformers, tuple(transformers_cpu.SETTINGS)),
        limit=limit,
        cache=cache or install.CACHE,
    )
    rows = compare.measure(options, names(workloads, NAMES), choice)
    write("peers", rows, asdict(options), out, model)


def settings(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Split setting names at semicolons, because names contain commas. `all` selects all, an empty
    text the defaults.
    """
    if text in ("", "all"):
        return known if text else ()
    return names(text, known, ";")


@app.command()
def serve(
    model: Model = "smollm2-135m",
    parts: Annotated[
        str, typer.Option(help="Parts, separated by commas.")
    ] = "throughput,first,arrival,idle",
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats", "--rounds", help="Rounds. Each engine runs once per round.", min=1
        ),
    ] = 3,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    engines: Annotated[str, typer.Option(help="Engines to measure.")] = "nano-inference,vllm",
    requests: Annotated[int, typer.Option(help="Requests per run of throughput.", min=1)] = 256,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.", min=1)] = 32,
    budgets: Annotated[
        str, typer.Option(help="Token budgets of a step for the part arrival.")
    ] = "24,40,72,264",
    cache: Annotated[Path | None, typer.Option(help="Folder of `make peers`.")] = None,
    out: Out = None,
) -> None:
    """Measure the server against the bare engine and vLLM's server: load, single requests, an
    arriving long prompt, idle cost.
    """
    from benchmarks.peers import install
    from benchmarks.serve import PARTS, Choice, measure

    # stops the servers at the end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = Options(model, dtype, backend, threads, repeats)
    choice = Choice(
        engines=names(engines, ("nano-inference", "vllm")),
        requests=requests,
        concurrency=concurrency,
        budgets=numbers(budgets),
        cache=cache or install.CACHE,
    )
    rows = measure(options, names(parts, PARTS), choice)
    write(
        "serve",
        rows,
        asdict(options) | {"requests": requests, "concurrency": concurrency},
        out,
        model,
    )


@app.command()
def agents(
    model: Model = "smollm2-135m",
    parts: Annotated[
        str, typer.Option(help="Parts, separated by commas: turns, 8k, chat.")
    ] = "turns,8k",
    files: Annotated[
        str, typer.Option(help="GGUF files: BF16, Q8_0, Q4_1, Q4_0, Q4_K_M.")
    ] = "BF16,Q8_0",
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats", "--rounds", help="Rounds. Each engine runs once per round.", min=1
        ),
    ] = 3,
    threads: Threads = None,
    engines: Annotated[str, typer.Option(help="Engines to measure.")] = "nano-inference,llama.cpp",
    sessions: Annotated[int, typer.Option(help="Sessions of the part turns.", min=1)] = 4,
    cache: Annotated[Path | None, typer.Option(help="Folder of `make peers`.")] = None,
    out: Out = None,
) -> None:
    """Measure agents' traces on the server and on llama.cpp's server, on the same files."""
    from benchmarks.agents import PARTS, STARTS, Choice, measure
    from benchmarks.peers import install
    from benchmarks.peers.file_formats import KINDS

    # stops the servers at the end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = Options(model, threads=threads, repeats=repeats)
    choice = Choice(
        names(parts, tuple(PARTS)),
        names(files, KINDS),
        names(engines, tuple(STARTS)),
        sessions,
        cache=cache or install.CACHE,
    )
    rows = measure(options, choice)
    figures = {name: each for name, each in asdict(choice).items() if name != "cache"}
    write("agents", rows, asdict(options) | figures, out, model)


@app.command()
def stages(
    model: Model = "smollm2-135m",
    number: Annotated[int, typer.Option("--stages", help="Stages of the pipeline.", min=2)] = 2,
    groups: Annotated[
        str, typer.Option(help="Numbers of sequence groups that take turns.")
    ] = "1,2,4",
    sequences: Annotated[int, typer.Option(help="Running sequences.", min=1)] = 32,
    tokens: Annotated[int, typer.Option(help="Completion tokens per sequence.", min=1)] = 128,
    repeats: Repeats = 3,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure the waiting share of pipeline stages. Every rank has one thread."""
    from benchmarks.stages import measure

    options = Options(model, dtype, backend, 1, repeats)
    rows = measure(options, number, numbers(groups), sequences, tokens)
    write(
        "stages",
        rows,
        asdict(options) | {"stages": number, "sequences": sequences, "tokens": tokens},
        out,
        model,
    )


@app.command()
def replicas(
    model: Model = "smollm2-135m",
    parts: Annotated[
        str, typer.Option(help="Parts, separated by commas.")
    ] = "router,throughput,failover",
    repeats: Repeats = 3,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    requests: Annotated[int, typer.Option(help="Requests per run of the engines.", min=1)] = 64,
    output_tokens: Annotated[int, typer.Option(help="Completion tokens per request.", min=1)] = 128,
    routed: Annotated[int, typer.Option(help="Replicas in the part router.", min=2)] = 1000,
    out: Out = None,
) -> None:
    """Measure the router's time, two replicas against two bare engines (one thread each), and the
    pause after a kill.
    """
    from benchmarks.replicas import PARTS, Shape, measure

    options = Options(model, dtype, backend, 1, repeats)
    shape = Shape(requests=requests, output_tokens=output_tokens)
    rows = measure(options, names(parts, PARTS), shape, routed)
    write("replicas", rows, asdict(options) | asdict(shape), out, model)


@app.command()
def rl_wire(
    model: Model = "smollm2-135m",
    parts: Annotated[str, typer.Option(help="Parts, separated by commas.")] = "logprobs,update",
    repeats: Annotated[
        int,
        typer.Option("--repeats", "--rounds", help="Rounds. Each form runs once per round.", min=1),
    ] = 5,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    engines: Annotated[str, typer.Option(help="Engines to measure.")] = "nano-inference,vllm",
    requests: Annotated[int, typer.Option(help="Requests per run.", min=1)] = 128,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.", min=1)] = 32,
    cache: Annotated[Path | None, typer.Option(help="Folder of `make peers`.")] = None,
    out: Out = None,
) -> None:
    """Measure logprobs over HTTP in every form, and weight updates from another process during
    streams.
    """
    from benchmarks.rl_wire import PARTS, choice_of, measure

    # stops the servers at the end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = Options(model, dtype, backend, threads, repeats)
    choice = choice_of(names(engines, ("nano-inference", "vllm")), requests, concurrency, cache)
    rows = measure(options, names(parts, PARTS), choice)
    write(
        "rl-wire",
        rows,
        asdict(options) | {"requests": requests, "concurrency": concurrency},
        out,
        model,
    )


@app.command()
def rl_drafts(
    model: Model = "smollm2-135m",
    parts: Annotated[str, typer.Option(help="Parts, separated by commas.")] = "grpo,rerun",
    steps: Annotated[int, typer.Option(help="Steps of a whole run.", min=1)] = 50,
    learning_rate: Annotated[
        float, typer.Option(help="Learning rate of a whole run. 2e-3 suits a tiny model.", min=0)
    ] = 2e-5,
    repeats: Repeats = 2,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure GRPO runs with and without drafts from history, and an evaluation repeated after a
    small update.
    """
    from benchmarks.rl_drafts import PARTS, Recipe, measure

    options = Options(model, dtype, backend, threads, repeats)
    recipe = Recipe(steps, learning_rate)
    rows = measure(options, names(parts, tuple(PARTS)), recipe)
    write("rl-drafts", rows, asdict(options) | {"recipe": asdict(recipe)}, out, model)


@app.command()
def mask(
    data: Annotated[Path, typer.Option(help="Clone of guidance-ai/jsonschemabench.")],
    model: Annotated[str, typer.Option(help="Model whose tokenizer splits the documents.")] = (
        "smollm2-135m"
    ),
    backends: Annotated[
        str, typer.Option(help="Backends, separated by commas. Default: all that are installed.")
    ] = "",
    every: Annotated[int, typer.Option(help="Test every n-th schema.", min=1)] = 20,
    limit: Annotated[float, typer.Option(help="Time limit of a schema in seconds.", min=1)] = 60.0,
    out: Out = None,
) -> None:
    """Run MaskBench: documents that JSON schema grammars accept and reject, and the
    time of masks.
    """
    from benchmarks.maskbench import NAMES, installed, measure

    chosen = names(backends, NAMES) if backends else installed(NAMES)
    options = {"every": every, "limit": limit}
    write("mask", measure(data, model, chosen, every, limit), options, out, model)


@app.command()
def grammars(
    model: Model = "smollm2-135m",
    sequences: Annotated[int, typer.Option(help="Decoding sequences.", min=1)] = 64,
    steps: Annotated[int, typer.Option(help="Timed steps per round.", min=1)] = 48,
    repeats: Annotated[
        int,
        typer.Option("--repeats", "--rounds", help="Rounds. Each case runs once per round.", min=1),
    ] = 5,
    cases: Annotated[str, typer.Option(help="Cases, separated by commas. Default: all.")] = "",
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    out: Out = None,
) -> None:
    """Measure the extra cost of a step whose sequences follow grammars, have a budget of thought
    or return logprobs of named ids.
    """
    from benchmarks.grammars import NAMES, measure

    options = Options(model, dtype, backend, threads, repeats)
    chosen = names(cases, NAMES) if cases else NAMES
    rows = measure(options, sequences, steps, chosen)
    write("grammars", rows, asdict(options) | {"sequences": sequences, "steps": steps}, out, model)


@app.command()
def speculation(
    model: Model = "smollm2-135m",
    source: Annotated[str, typer.Option(help="Source of the drafts.")] = "suffix",
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas. Default: all.")] = "",
    parts: Annotated[
        str,
        typer.Option(
            help="Parts. own: all tasks. peers: tasks of one stream, against other engines."
        ),
    ] = "own,peers",
    engines: Annotated[
        str, typer.Option(help="Engines to compare.")
    ] = "nano-inference,vllm,llama.cpp",
    temperature: Annotated[
        float, typer.Option(help="Temperature of all samples. 0: greedy.", min=0.0)
    ] = 1.0,
    codes: Annotated[
        str, typer.Option(help="Quantization of the drafts of --source mtp, such as int8.")
    ] = "",
    vllm_dtype: Annotated[
        str,
        typer.Option(help="Dtype of vLLM. Default: --dtype. Without AVX-512, float32 is faster."),
    ] = "",
    repeats: Annotated[
        int, typer.Option("--repeats", "--rounds", help="Rounds per task.", min=1)
    ] = 3,
    threads: Threads = None,
    backend: Backend = "auto",
    dtype: DType = "bfloat16",
    cache: Annotated[Path | None, typer.Option(help="Folder of `make peers`.")] = None,
    out: Out = None,
) -> None:
    """Measure the savings of drafts: one stream of chat, code and JSON, long-tailed rollouts, a
    large batch.

    One stream also runs on the installed peers, in turns.
    """
    from benchmarks.peers import drafts, install
    from benchmarks.speculation import TASKS, at, measure, streams

    options = Options(model, dtype, backend, threads, repeats)
    chosen = names(parts, ("own", "peers"))
    if codes and "own" not in chosen:
        raise typer.BadParameter("--codes needs --parts own; peers have no drafts of codes.")
    known = tuple(task.name for task in TASKS)
    asked = names(tasks or ",".join(known), known)
    picked = tuple(task for task in TASKS if task.name in asked)
    beside = names(engines, tuple(drafts.SETTINGS))
    rows = []
    if "own" in chosen:
        rows += measure(options, source, at(temperature, picked), codes or None)
    if "peers" in chosen:
        # stops the engines at the end
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        found = streams(model, at(temperature, picked))
        rows += drafts.measure(options, found, beside, vllm_dtype or dtype, cache or install.CACHE)
    how = {"source": source, "codes": codes, "temperature": temperature}
    write("speculation", rows, asdict(options) | how, out, model)


@app.command()
def plots(
    results: Annotated[Path | None, typer.Option(help="Folder of the reports.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the pictures. Default: docs/.")
    ] = None,
) -> None:
    """Draw the reports as PNG pictures for the documents (needs matplotlib)."""
    from benchmarks.plots import draw

    for path in draw(results, out):
        print(path)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore (a long run is watched through a pipe)
    app()
