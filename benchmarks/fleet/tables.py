"""`python -m benchmarks.fleet.tables`: the tables of `docs/scale.md`, put between its marks.

Computed ones come from `arithmetic.py`, simulated ones from the report in `results/fleet.json`.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.fleet.arithmetic import (
    H100,
    M8,
    M70,
    MODELS,
    MOE,
    Choice,
    Plan,
    Shape,
    choices,
    context_bytes,
    context_keys_bytes,
    expert_bytes,
    kv_token_bytes,
    kv_tokens,
    pipeline_bytes,
    tensor_bytes,
    weight_bytes,
)

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "scale.md"
REPORT = ROOT / "benchmarks" / "results" / "fleet.json"
MARKED = re.compile(r"(<!-- table: ([a-z ]+) -->\n)(.*?)(<!-- end -->)", re.S)
Rows = list[dict[str, Any]]


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Markdown; all but the first column to the right."""
    columns = head.split(" | ")
    lines = [f"| {head} |", "|" + "|".join(["---", *(["---:"] * (len(columns) - 1))]) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def kilobytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e3:,.0f} kB"


def thousands(number: float) -> str:
    return f"{number / 1e3:,.0f} k"


def models(_: Rows) -> str:
    """Parameters, keys and values."""
    head = "model | parameters | of a token | weights | KV a token | layers | hidden"
    return table(
        head,
        (
            (
                shape.name,
                f"{shape.parameters / 1e9:.1f} G",
                f"{shape.active / 1e9:.1f} G",
                gigabytes(2 * shape.parameters),
                kilobytes(shape.kv_bytes),
                shape.layers,
                shape.hidden,
            )
            for shape in MODELS
        ),
    )


def memory(_: Rows) -> str:
    """Of a rank, by strategy."""
    cases: list[tuple[Shape, Plan]] = [
        *((M8, Plan(tensor=tensor)) for tensor in (1, 2, 8)),
        *(
            (M70, plan)
            for plan in (Plan(tensor=2), Plan(tensor=4), Plan(tensor=8), Plan(tensor=4, pipeline=2))
        ),
        *((M70, plan) for plan in (Plan(pipeline=8), Plan(tensor=4, context=2))),
        (MOE, Plan(tensor=8)),
        *((MOE, Plan(tensor=8, pipeline=pipeline, expert=True)) for pipeline in (2, 4)),
        (MOE, Plan(data=64, expert=True)),
    ]
    return table(
        "model | strategy | weights a rank | KV a token and rank | tokens an engine holds",
        (
            (
                shape.name,
                plan,
                gigabytes(weight_bytes(shape, plan)),
                kilobytes(kv_token_bytes(shape, plan)),
                thousands(kv_tokens(shape, plan)) if kv_tokens(shape, plan) else "does not fit",
            )
            for shape, plan in cases
        ),
    )


def sums(_: Rows) -> str:
    """Tensor parallel, by how partial sums are added up."""
    hows = ("gather", "exchange", "columns", "ring")
    return table(
        "model, ranks | gather, float32 (NCCL, built) | hypercube, float32 (gloo, built) | by "
        "columns, float32 | "
        "ring, bfloat16",
        (
            (
                f"{shape.name}, {ranks}",
                *(kilobytes(tensor_bytes(shape, ranks, how)) for how in hows),
            )
            for shape in (M8, M70)
            for ranks in (2, 4, 8)
        ),
    )


def exchanges(_: Rows) -> str:
    """The other strategies."""
    rows: list[tuple[str, str, str]] = [
        (f"{shape.name}: PP, once a stage", "residual stream", kilobytes(pipeline_bytes(shape)))
        for shape in MODELS
    ]
    rows += [
        (
            f"{MOE.name}: EP {ranks}, a layer",
            "rows out, products back",
            kilobytes(expert_bytes(MOE, ranks)),
        )
        for ranks in (8, 64)
    ]
    for context in (4096, 131072):
        name = f"{M8.name}: CP 2 at {context:,} tokens, a layer"
        rows.append((name, "query out, states back", kilobytes(context_bytes(M8, 2, context))))
        every = (
            "all keys and values, once for all rows: "
            f"{kilobytes(context_keys_bytes(M8, 2, context))}"
        )
        rows.append(
            (f"{name}, not built", every, kilobytes(context_keys_bytes(M8, 2, context) / 512))
        )
    return table("exchange | what | a token (of 512 rows)", rows)


def strategies(_: Rows) -> str:
    """What to run."""

    def row(shape: Shape, devices: int, what: str, found: Choice | None) -> tuple[object, ...]:
        if found is None:
            return shape.name, devices, what, "does not fit", "", "", "", "", ""
        return (
            shape.name,
            devices,
            what,
            found.plan,
            gigabytes(found.weights),
            f"{found.latency * 1e3:.1f} ms",
            found.batch,
            f"{found.step * 1e3:.0f} ms",
            f"{found.tokens:,.0f}",
        )

    rows: list[tuple[object, ...]] = []
    for shape in MODELS:
        for devices in (1, 8, 64):
            found = choices(shape, devices)
            if not found:
                rows.append(row(shape, devices, "", None))
                continue
            rows.append(row(shape, devices, "most tokens", found[0]))
            fastest = min(found, key=lambda each: each.latency)
            if fastest.plan != found[0].plan:
                rows.append(row(shape, devices, "first to answer", fastest))
    head = (
        "model | GPUs | for | strategy | weights a rank | a token alone | batch | its step | "
        "tokens a second"
    )
    return table(head, rows)


def router(report: Rows) -> str:
    """The simulated fleet."""

    def seconds(value: float) -> str:
        return f"{value:.3f}" if value < 10 else f"{value:.1f}"

    head = (
        "run | replicas | requests | in a replica | max / mean | hit rate | ideal | first token "
        "p50 | p99 | p99.9 | "
        "whole p50 | p99 | p99.9"
    )
    found = [row for row in report if "balance_mean" in row]
    return table(
        head,
        (
            (
                row["name"],
                f"{row['replicas']:,}",
                f"{row['requests']:,}",
                row["mean_in_replica"],
                f"{row['balance_mean']:.2f}",
                f"{row['hit_rate']:.1%}",
                f"{row['hit_rate_ideal']:.1%}",
                *(
                    seconds(row[part][mark])
                    for part in ("first_token", "whole")
                    for mark in ("p50", "p99", "p99.9")
                ),
            )
            for row in found
        ),
    )


def loss(report: Rows) -> str:
    """What a loss costs."""
    row = next(row for row in report if "moved" in row)
    moved = row["moved"]
    again, computed = moved["computed_again"], row["computed_prompt_tokens"]
    return table(
        "what | figure",
        (
            ("requests continued elsewhere", f"{moved['requests']:,}"),
            ("of which had begun to answer", f"{moved['had_begun']:,}"),
            (
                "tokens computed again for them",
                f"{again:,} ({again / computed:.3%} of all computed)",
            ),
            ("pause that their clients see, p50", f"{moved['pause']['p50']:.2f} s"),
            ("p99", f"{moved['pause']['p99']:.2f} s"),
            ("longest", f"{moved['pause']['max']:.2f} s"),
        ),
    )


def broadcast(report: Rows) -> str:
    """Weights to a thousand."""
    found = [row for row in report if row["name"].startswith("broadcast")]
    return table(
        "weights, tree, chunks | median | last | last / least",
        (
            (
                row["name"].removeprefix("broadcast "),
                f"{row['median']:.2f} s",
                f"{row['last']:.2f} s",
                f"{row['last'] / row['least']:.1f}",
            )
            for row in found
        ),
    )


TABLES: dict[str, Callable[[Rows], str]] = {
    "models": models,
    "memory": memory,
    "sums": sums,
    "exchanges": exchanges,
    "strategies": strategies,
    "router": router,
    "loss": loss,
    "broadcast": broadcast,
}


def filled(text: str, report: Rows) -> str:
    """The document with its tables as they are now. Raises `KeyError` for a mark that names
    none.
    """
    return MARKED.sub(lambda mark: mark[1] + TABLES[mark[2]](report) + mark[4], text)


def report_rows() -> Rows:
    return json.loads(REPORT.read_text())["rows"]


def main() -> None:
    DOCUMENT.write_text(filled(DOCUMENT.read_text(), report_rows()))
    print(f"written: {DOCUMENT}; {H100}")


if __name__ == "__main__":
    main()
