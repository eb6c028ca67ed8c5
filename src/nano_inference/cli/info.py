"""`nano-inference info`: describe a model and its engine without reading weights."""

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from nano_inference.cli import options
from nano_inference.cli.field_options import FieldOptions
from nano_inference.cli.terminal import errors, output
from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError

if TYPE_CHECKING:
    from nano_inference.checkpoints.gguf.tokenizer import GgufVocabulary
    from nano_inference.models.sharding.shard import ModelShard
    from nano_inference.models.spec.model import ModelSpec
    from nano_inference.models.spec.rope import RopeSpec
    from nano_inference.ranks.build import EnginePlan
    from nano_inference.text.tokenizer import Tokenizer

Rows = list[tuple[str, str]]


_Engine = Annotated[
    options.Values,
    FieldOptions(
        EngineConfig,
        (
            *("ref_model_path", "tokenizer_path", "dtype", "quantization", "device"),
            *("kv_cache_memory", "kv_cache_dtype", "cpu_sums", "max_model_len"),
            *(*options.RANKS, "block_size"),
        ),
    ),
]


@options.from_fields
def info(
    model: options.MaybeModel = None,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object instead of tables.")
    ] = False,
    selftest: Annotated[
        bool,
        typer.Option(
            "--selftest",
            help="Compare every set of kernels on this machine with the reference, on small inputs "
            "or with the widths of MODEL. Exits with 1 if one differs.",
        ),
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Show the cards of this machine and the needs of the kernels. Exits with 1 if "
            "no card can be used.",
        ),
    ] = False,
    engine: _Engine,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Show a model: architecture, memory, numerics, tokenizer.

    Reads the configuration but no weights, so it is fast for large models too.

    Examples:

    nano-inference info smollm2-135m --max-model-len 4096
    nano-inference info model.gguf --json
    nano-inference info --selftest
    nano-inference info --gpu
    """
    if gpu:
        _gpus(as_json=as_json)
        return
    if selftest:
        _selftest(model)
        return
    if model is None:
        raise typer.BadParameter("MODEL is missing; try smollm2-135m.")
    with errors.status(f"reading {model}"):
        plans = _plans(EngineConfig(model, **engine))
        plan = plans[0]
        text_side = _tokenizer(plan)
    if as_json:
        typer.echo(json.dumps(_as_json(plan, text_side) | _ranks_as_json(plans), indent=2))
        return
    output.print(
        Text.assemble((model, "bold"), (f"  {_short(_policy(plan)[0])}", "dim")), soft_wrap=True
    )
    for name, rows in (
        ("architecture", _architecture(plan)),
        (f"memory on {plan.device}" + (", rank 0" if len(plans) > 1 else ""), _memory(plan)),
        *((("ranks", _ranks(plans)),) if len(plans) > 1 else ()),
        ("numerics", _numerics(plan)),
        ("tokenizer", _tokenizer_rows(text_side)),
    ):
        output.print()
        output.print(name, style="bold cyan")
        output.print(_table(rows))


def _gpus(*, as_json: bool) -> None:
    """Print the cards and requirements. Exit with 1 if no card can be used."""
    from nano_inference.device.backends import require_torch

    require_torch("a GPU", extra="gpu")
    from nano_inference.device.gpu_report import find_gpus

    report = find_gpus()
    if as_json:
        typer.echo(json.dumps(asdict(report) | {"usable": report.usable}, indent=2))
    else:
        output.print("requirements", style="bold cyan")
        output.print(
            _table([(each.name, _with(each.value, each.problem)) for each in report.requirements])
        )
        for card in report.cards:
            output.print()
            output.print(card.device, style="bold cyan")
            memory = f"{_size(card.free)} of {_size(card.total)} free"
            verdict = "the CUDA kernels can run" if card.problem is None else card.problem
            rows = [("card", f"{card.name}, compute capability {card.capability}")]
            output.print(
                _table([*rows, ("memory", _with(memory, card.note)), ("verdict", verdict)])
            )
        if not report.cards:
            output.print()
            output.print("no card found; engines on this machine compute on the CPU.")
    if not report.usable:
        raise typer.Exit(1)


def _with(value: str, remark: str | None) -> str:
    return value if remark is None else f"{value}: {remark}"


def _selftest(model: str | None) -> None:
    """Print a line per set of kernels. Exit with 1 if one differs from the reference."""
    from nano_inference.checkpoints.folders import describe_model, load_spec
    from nano_inference.device.backends import require_torch

    require_torch("the reference of a selftest")
    from nano_inference.device.selftest import kernel_sets, selftest, usual_specs

    specs = usual_specs() if model is None else [load_spec(describe_model(model))]
    sets, differ = kernel_sets(), 0
    if not sets:
        raise ConfigError(
            "there are no kernels to test: this machine runs the reference backend; install a C++ "
            "compiler, or Triton for a GPU."
        )
    for kernels, problem in selftest(specs, sets):
        differ += problem is not None
        verdict = "agrees with the reference" if problem is None else f"DIFFERS: {problem}"
        typer.echo(f"{kernels}: {verdict}")
    if differ:
        raise typer.Exit(1)


def _plans(config: EngineConfig) -> "list[EnginePlan]":
    """Return the plan of every rank, for each engine if several engines share the experts."""
    from nano_inference.checkpoints.folders import describe_model
    from nano_inference.checkpoints.shard_checks import mesh_of
    from nano_inference.parallel.mesh import Place
    from nano_inference.ranks.build import Rank, counted_weights, plan_engine

    mesh, engines = mesh_of(config), config.expert_parallel if config.tensor_parallel == 1 else 1
    here = mesh.world_size * engines
    places = [
        (Place(mesh, rank), (engine, engines))
        for engine in range(engines)
        for rank in range(mesh.world_size)
    ]
    plans = [
        plan_engine(config, rank=Rank(place, here, engines=engine), resolve=describe_model)
        for place, engine in places
    ]
    return [
        replace(plan, memory_budget=replace(plan.memory_budget, weights=counted_weights(plan)))
        for plan in plans
    ]


def _part(plan: "EnginePlan") -> "ModelShard":
    from nano_inference.core.sequence import POLICY

    return plan.parts[POLICY]


def _held(plan: "EnginePlan") -> dict[str, tuple[int, int]]:
    """Return the rank's range in each dimension of the model: (first, one past the last)."""
    part = _part(plan)
    held = {
        "layers": part.layers,
        "query heads": part.heads,
        "key-value heads": part.kv_heads,
        "MLP columns": part.inner,
        "experts": part.experts,
        "vocabulary": part.vocab,
    }
    return {name: (each.start, each.stop) for name, each in held.items() if each}


def _ranks_as_json(plans: "list[EnginePlan]") -> dict[str, Any]:
    if len(plans) == 1:
        return {}
    return {
        "ranks": [
            {"rank": rank, "memory": asdict(plan.memory_budget)}
            | {
                name.replace(" ", "_").replace("-", "_"): list(held)
                for name, held in _held(plan).items()
            }
            for rank, plan in enumerate(plans)
        ]
    }


def _ranks(plans: "list[EnginePlan]") -> Rows:
    """Return a row per rank: the ranges in which ranks differ, and the memory."""
    held = [_held(plan) for plan in plans]
    rows: Rows = []
    for rank, (plan, ranges) in enumerate(zip(plans, held, strict=True)):
        parts = [
            f"{name} {first:,}" + (f" to {stop - 1:,}" if stop - first > 1 else "")
            for name, (first, stop) in ranges.items()
            if any(other[name] != ranges[name] for other in held)
        ]
        if (mesh := _part(plan).position.mesh).context > 1:
            parts.append(
                f"part {_part(plan).position.context_rank + 1} of {mesh.context} of each "
                "sequence's KV cache"
            )
        budget = plan.memory_budget
        parts.append(f"weights {_size(budget.weights)}, KV cache up to {_size(budget.kv_cache)}")
        rows.append((f"rank {rank}", "; ".join(parts)))
    return rows


def _policy(plan: "EnginePlan") -> "tuple[Path, ModelSpec]":
    from nano_inference.core.sequence import POLICY

    return plan.folders[POLICY], plan.specs[POLICY]


def _tokenizer(plan: "EnginePlan") -> "Tokenizer | GgufVocabulary | None":
    """Return the tokenizer of a folder, or the vocabulary in the header of a GGUF file."""
    from nano_inference.checkpoints.folders import describe_model, gguf_of
    from nano_inference.checkpoints.gguf.tokenizer import read_vocabulary
    from nano_inference.text.tokenizer import has_tokenizer, load_tokenizer

    other = plan.config.tokenizer_path
    if (file := gguf_of(other or plan.config.model_path)) is not None:
        return read_vocabulary(file)
    folder = describe_model(other) if other is not None else _policy(plan)[0]
    return load_tokenizer(folder) if other is not None or has_tokenizer(folder) else None


def _num_parameters(spec: "ModelSpec") -> int:
    from math import prod

    from nano_inference.models.parameters.table import param_table

    return sum(prod(param.shape) for param in param_table(spec))


def _as_json(plan: "EnginePlan", tokenizer: "Tokenizer | GgufVocabulary | None") -> dict[str, Any]:
    folder, spec = _policy(plan)
    budget = plan.memory_budget
    return {
        "model": plan.config.model_path,
        "folder": str(folder),
        "architecture": asdict(spec),
        "num_parameters": _num_parameters(spec),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "memory": asdict(budget) | {"num_tokens": budget.num_tokens},
        "numerics": asdict(plan.numerics) | {"fingerprint": plan.numerics.fingerprint},
        "kernels": _kernels(plan),
        "tokenizer": None
        if tokenizer is None
        else {
            "vocab_size": tokenizer.vocab_size,
            "eos_token_id": tokenizer.eos_token_id,
            "special_tokens": dict(tokenizer.special_tokens),
            "has_chat_template": tokenizer.chat_template is not None,
        },
    }


def _table(rows: Rows) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=20, no_wrap=True)  # the same in all tables, to align them
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(f"  {label}", Text(value))
    return table


def _architecture(plan: "EnginePlan") -> Rows:
    _, spec = _policy(plan)
    embedding = spec.vocab_size * spec.hidden_size
    embedding_size = f"{embedding / 1e6:,.1f} M"
    head = "shared with the head" if spec.tie_word_embeddings else f"{embedding_size} head"
    dtype = str(plan.dtype).removeprefix("torch.")
    source = (
        "blocks of a .gguf file" if spec.quantized_source else f"checkpoint {spec.checkpoint_dtype}"
    )
    coded = spec.quantisation
    return [
        ("class", spec.architecture),
        (
            "parameters",
            f"{_num_parameters(spec) / 1e6:,.1f} M, including {embedding_size} embedding, {head}",
        ),
        ("dtype", f"{dtype} ({source})"),
        *((("weights", f"codes, {codes}"),) if (codes := plan.config.codes) else ()),
        *(
            (("quantisation", coded.computed if codes == "file" else coded.becomes(dtype)),)
            if coded is not None
            else ()
        ),
        ("layers", f"{spec.num_layers}"),
        ("hidden size", f"{spec.hidden_size:,}"),
        ("MLP", _mlp(spec)),
        (
            "heads",
            _heads(spec),
        ),
        *((("states", _states(spec)),) if spec.state is not None else ()),
        ("windows", _windows(spec.windows)),
        ("rope", _ropes(spec.ropes)),
        ("norms", _norms(spec)),
        ("vocabulary", f"{spec.vocab_size:,} rows"),
        ("context", f"{spec.max_position:,} tokens"),
        (
            "ends with",
            ", ".join(f"token {token_id}" for token_id in spec.eos_token_ids) or "no end token",
        ),
    ]


def _heads(spec: "ModelSpec") -> str:
    kinds = [spec.layer(layer) for layer in range(spec.num_layers)]
    counts = Counter((kind.num_kv_heads, kind.head_dim) for kind in kinds)
    parts = [
        f"{kv_heads} key-value heads of width {head_dim}"
        + (f" in {count} layers" if len(counts) > 1 else "")
        for (kv_heads, head_dim), count in counts.items()
    ]
    shared = sum(kind.keys_of != layer for layer, kind in enumerate(kinds))
    readers = f"; {shared} layers reuse keys and values of others" if shared else ""
    return f"{spec.num_heads} query heads, {'; '.join(parts)}{readers}"


def _mlp(spec: "ModelSpec") -> str:
    moe = spec.moe
    if moe is None:
        return f"{spec.intermediate_size:,}, {spec.activation}"
    experts = (
        f"{moe.num_experts} experts of {moe.intermediate_size:,}, {moe.experts_per_token} per token"
    )
    if moe.shared is not None:
        experts += f", plus a shared expert of {moe.shared.intermediate_size:,}"
    dense = moe.layers.count(False)
    if moe.beside:
        experts += f", plus a dense MLP of {spec.intermediate_size:,}"
    where = (
        f"; {dense} of {spec.num_layers} layers are dense ({spec.intermediate_size:,})"
        if dense
        else ""
    )
    return f"{experts}, {spec.activation}{where}"


def _states(spec: "ModelSpec") -> str:
    assert spec.state is not None
    return f"{sum(spec.state.layers)} of {spec.num_layers} layers: {spec.state}"


def _windows(windows: tuple[int, ...]) -> str:
    parts = [
        f"{count} layers attend to {f'the last {window:,} tokens' if window else 'all tokens'}"
        for window, count in sorted(Counter(windows).items(), reverse=True)
    ]
    return ", ".join(parts) if any(windows) else "none: every layer attends to all tokens"


def _ropes(ropes: "tuple[RopeSpec, ...]") -> str:
    counts = Counter(ropes)
    if len(counts) == 1:
        return _rope(ropes[0])
    return "; ".join(f"{count} layers {_rope(rope)}" for rope, count in counts.items())


def _rope(rope: "RopeSpec") -> str:
    if rope.kind == "none":
        return "none"
    text = f"theta {rope.theta:,.0f}"
    return text if rope.kind == "default" else f"{text}, {rope.kind} scaling by {rope.factor:g}"


def _norms(spec: "ModelSpec") -> str:
    position = {"pre": "before", "post": "after", "both": "before and after"}[spec.norms]
    queries = {"head": ", on queries and keys per head", "full": ", on queries and keys", None: ""}[
        spec.qk_norm
    ]
    return f"RMS {position} attention and MLP{queries}, epsilon {spec.rms_norm_eps:g}"


def _memory(plan: "EnginePlan") -> Rows:
    budget = plan.memory_budget
    return [
        ("weights", _size(budget.weights)),
        *((name, _size(size)) for name, size in budget.claims()),
        (
            "KV cache",
            f"{_size(budget.kv_cache)} = {budget.num_blocks:,} blocks of {budget.block_size} "
            "tokens",
        ),
        *((("states", budget.told_states()),) if budget.state_bytes else ()),
        ("a token takes", f"{budget.bytes_per_token:,} bytes"),
        ("tokens that fit", f"{budget.num_tokens:,}"),
        ("longest sequence", f"{budget.max_model_len:,} tokens"),
    ]


def _numerics(plan: "EnginePlan") -> Rows:
    kept = plan.numerics.schedule_invariant
    kernels = _kernels(plan)
    return [
        ("fingerprint", plan.numerics.fingerprint),
        *((("kernels", kernels),) if kernels else ()),
        ("schedule invariant", "yes" if kept else "no"),
        (
            "",
            "A token's bits do not depend on batch, chunks, cache or preemption, so samples can be "
            "replayed."
            if kept
            else "The last bits of a logprob may depend on the other sequences in the batch.",
        ),
    ]


def _kernels(plan: "EnginePlan") -> str | None:
    """Return the build of the CPU kernels in use, or None."""
    from nano_inference.ops.cpu.build import best_instruction_set

    if plan.numerics.backend != "cpu":
        return None
    return best_instruction_set(None if plan.config.cpu_sums == "auto" else plan.config.cpu_sums)


def _tokenizer_rows(tokenizer: "Tokenizer | GgufVocabulary | None") -> Rows:
    if tokenizer is None:
        return [("", "none: pass token ids, or use --tokenizer")]
    special = [
        f"{name.removesuffix('_token')} {text}" for name, text in tokenizer.special_tokens.items()
    ]
    return [
        ("vocabulary", f"{tokenizer.vocab_size:,} tokens"),
        ("special tokens", ", ".join(special) or "none"),
        (
            "chat template",
            "yes" if tokenizer.chat_template is not None else "no: the model continues text",
        ),
    ]


def _size(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def _short(folder: Path) -> str:
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)
