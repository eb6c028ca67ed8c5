"""The reports as PNG pictures for the documents. A picture without a report is skipped."""

import hashlib
import json
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.measure import RESULTS, Row
from benchmarks.peers.compare import OURS, best

PICTURES = ROOT / "docs"
DIGEST = "Description"  # PNG keyword of a picture's digest
COLORS = {OURS: "#2a6fdb", "vllm": "#e08e0b", "llama.cpp": "#7a7a7a"}
WARM = "#b5563c"
# The rate of a workload is the first of these that its row has. README's table shows the same.
RATES = ("decode_tokens_per_s", "prompt_tokens_per_s", "output_tokens_per_s")
LEAST_DRAFTS = 20  # drafts at a position, below which no share is shown
HOST_BUDGET_US = 3.9  # per sequence and step: 1 ms at 256 sequences

# Published costs of exactness, as extra time. Each engine is compared with itself.
PUBLISHED = {
    # "reduces performance overhead to just 34.35% (vs. TML's 61.5%)", on a GPU, average over their
    # tests: https://lmsys.org/blog/2025-09-22-sglang-deterministic
    "SGLang": 0.3435,
    # Same figures, from https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/
    "Thinking\nMachines": 0.615,
    # "2.4x slower", a whole RL run with TorchTitan, on GPUs:
    # https://blog.vllm.ai/2025/11/10/bitwise-consistent-train-inference.html
    "TorchTitan\nand vLLM, RL": 1.4,
}


def draw(results: Path | None = None, out: Path | None = None) -> list[Path]:
    """Draw all pictures whose reports exist. Return their paths. Requires matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update(
        {
            "figure.dpi": 150,
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
        }
    )
    folder, written = out or PICTURES, []
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in DRAWN.items():
        figure = picture(results or RESULTS)
        if figure is not None:
            path = folder / f"benchmark-{name}.png"
            figure.savefig(path, metadata={"Software": None, DIGEST: digest_of(figure)})
            mpl.pyplot.close(figure)
            written.append(path)
    return written


def digest_of(figure: Any) -> str:
    """Return a digest of the numbers and words in a figure. Its file stores the digest, so a test
    detects outdated pictures without drawing.
    """
    shown = [
        [
            [axis.get_title(), axis.get_xlabel(), axis.get_ylabel()],
            [f"{patch.get_height():.6g}" for patch in axis.patches if hasattr(patch, "get_height")],
            [[f"{float(value):.6g}" for value in line.get_ydata()] for line in axis.lines],
            [text.get_text() for text in axis.texts],
        ]
        for axis in figure.axes
    ]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def rows_of(results: Path, name: str) -> list[Row]:
    path = results / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def figure_of(columns: int, width: float, height: float = 3.0) -> tuple[Any, list[Any]]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, columns, figsize=(width, height), squeeze=False, layout="constrained"
    )
    return figure, list(axes[0])


def bars(
    axis: Any,
    labels: list[str],
    spreads: list[dict[str, Any]],
    colors: list[str],
    form: str = "{:.0f}",
) -> None:
    """Draw bars at the medians, lines between the extremes, and the medians as text."""
    middles = [each["median"] for each in spreads]
    reach = [
        [each["median"] - each["min"] for each in spreads],
        [each["max"] - each["median"] for each in spreads],
    ]
    axis.bar(labels, middles, color=colors, yerr=reach, ecolor="#222222", capsize=2, width=0.7)
    for place, each in enumerate(spreads):
        up = each["median"] >= 0
        text, end = form.format(each["median"]), each["max"] if up else each["min"]
        aligned = {"ha": "center", "va": "bottom" if up else "top"}
        axis.annotate(
            text, (place, end), xytext=(0, 2 if up else -2), textcoords="offset points", **aligned
        )
    axis.margins(y=0.15)
    axis.tick_params(axis="x", labelsize=7.5)


def peers(results: Path, report: str = "peers") -> Any:
    """Draw a panel per workload: tokens per second of each engine's best setting."""
    rows = rows_of(results, report)
    names = sorted({row["workload"] for row in rows if row["engine"] == OURS})
    if not names:
        return None
    figure, axes = figure_of(len(names), 1.9 * len(names) + 0.4)
    for axis, name in zip(axes, names, strict=True):
        found = [(engine, row) for engine in COLORS if (row := best(rows, name, engine))]
        key = next(rate for rate in RATES if rate in found[0][1])
        labels = [engine.replace("-", "-\n") for engine, _ in found]
        bars(axis, labels, [row[key] for _, row in found], [COLORS[engine] for engine, _ in found])
        what = found[0][1]["what"].split(":")[0]
        axis.set_title(f"{name}: {what}\n{key.split('_')[0]} tokens a second", fontsize=8)
    return figure


def peers_of_qwen(results: Path) -> Any:
    return peers(results, "peers-qwen3-0.6b-random")


def share_of_bound(results: Path) -> Any:
    rows = [row for row in rows_of(results, "roofline") if "share_of_bound" in row]
    if not rows:
        return None
    figure, (axis,) = figure_of(1, 5.5)
    percent = [
        {key: 100 * row["share_of_bound"][key] for key in ("median", "min", "max")} for row in rows
    ]
    bars(axis, [row["workload"] for row in rows], percent, [COLORS[OURS]] * len(rows), "{:.0f} %")
    axis.axhline(100, color=WARM, linewidth=1)
    axis.set_ylabel("% of the machine's limit")
    axis.set_title("Share of the bound by arithmetic and memory", fontsize=9)
    return figure


def host(results: Path) -> Any:
    """Plot microseconds per step against sequences: a line for each case measured at several
    numbers, else points.
    """
    report = results / "host.json"
    if not report.exists():
        return None
    content = json.loads(report.read_text())
    cases: dict[str, list[Row]] = {}
    for row in content.get("rows") or content["figures"]:
        cases.setdefault(row["case"], []).append(row)
    figure, (axis,) = figure_of(1, 6.5, 3.6)
    for case, rows in cases.items():
        numbers, middles = [row["running"] for row in rows], [row["median"] for row in rows]
        reach = [
            [row["median"] - row["least"] for row in rows],
            [row["most"] - row["median"] for row in rows],
        ]
        axis.errorbar(
            numbers,
            middles,
            yerr=reach,
            marker="o",
            markersize=3,
            capsize=2,
            linewidth=1,
            label=case,
        )
    most = max(row["running"] for rows in cases.values() for row in rows)
    axis.plot([0, most], [0, most * HOST_BUDGET_US], color="#222222", linestyle=":", label="budget")
    axis.set_xlabel("sequences in a step")
    axis.set_ylabel("µs a step on the host")
    axis.legend(fontsize=7, frameon=False)
    return figure


def exactness(results: Path) -> Any:
    """Plot the extra time of exact logprobs: published figures, and ours against the fastest engine
    here without exactness.
    """
    own = own_costs(results)
    if not own:
        return None
    figure, (axis,) = figure_of(1, 8.0, 3.4)
    costs = PUBLISHED | own
    spreads = [
        {"median": 100 * cost, "min": 100 * cost, "max": 100 * cost} for cost in costs.values()
    ]
    colors = [WARM] * len(PUBLISHED) + [COLORS[OURS]] * len(own)
    bars(axis, list(costs), spreads, colors, "{:+.0f} %")
    axis.axhline(0, color="#222222", linewidth=1)
    axis.set_ylabel("extra time, %")
    axis.set_title(
        "Cost of exactness: published figures (GPUs), and here against inexact engines (CPU)",
        fontsize=9,
    )
    return figure


def own_costs(results: Path) -> dict[str, float]:
    """Return the extra time by workload against the faster peer, and of our products against
    torch's.
    """
    rows, costs = rows_of(results, "peers"), {}
    for name in sorted({row["workload"] for row in rows}):
        ours = best(rows, name, OURS)
        others = [row for peer in ("vllm", "llama.cpp") if (row := best(rows, name, peer))]
        if ours and others:
            other = min(others, key=lambda row: row["seconds"]["median"])
            costs[f"{name} against\n{other['engine']}"] = (
                ours["seconds"]["median"] / other["seconds"]["median"] - 1
            )
    for row in rows_of(results, "roofline"):
        if "kernel_product" in row:
            costs["products\nagainst torch"] = (
                row["torch_product"]["median"] / row["kernel_product"]["median"] - 1
            )
    return costs


def server(results: Path) -> Any:
    """Plot tokens per second through servers, and the time between tokens before and during a long
    prompt's arrival.
    """
    rows = rows_of(results, "serve")
    rates = [row for row in rows if row["part"] == "throughput"]
    arrivals = [row for row in rows if row["part"] == "arrival"]
    if not (rates and arrivals):
        return None
    figure, (left, right) = figure_of(2, 8.0, 3.2)
    labels = [
        row["engine"].replace("-", "-\n").replace(", ", ",\n") + "\n" + row["form"] for row in rates
    ]
    colors = [COLORS["vllm" if row["engine"] == "vllm" else OURS] for row in rates]
    bars(left, labels, [row["output_tokens_per_s"] for row in rates], colors)
    left.tick_params(axis="x", labelsize=6)
    left.set_title("32 requests at once, 64 -> 128: tokens a second", fontsize=8)
    places = list(range(len(arrivals)))
    for shift, key, color, label in (
        (-0.2, "before_p99_ms", COLORS[OURS], "before"),
        (0.2, "during_p99_ms", WARM, "meanwhile"),
    ):
        heights = [row[key]["median"] for row in arrivals]
        right.bar(
            [place + shift for place in places], heights, width=0.38, color=color, label=label
        )
        for place, height in zip(places, heights, strict=True):
            right.annotate(
                f"{height:,.0f}", (place + shift, height), ha="center", va="bottom", fontsize=7
            )
    right.set_yscale("log")
    right.set_xticks(places, [str(row["budget"] or "unbounded") for row in arrivals])
    right.set_xlabel("tokens a step")
    right.set_title("8 streams, a prompt of 4,096 arrives: ms between tokens, p99", fontsize=8)
    right.legend(fontsize=7, frameon=False)
    return figure


def drafts(results: Path) -> Any:
    """Plot the savings of drafts by task, their acceptance by position, and the time of a step by
    its rows.
    """
    rows = rows_of(results, "speculation")
    tasks = [row for row in rows if "cpu_ratio" in row]
    if not tasks:
        return None
    figure, (saved, places, steps) = figure_of(3, 10, 3.2)
    names = [row["name"].replace(" ", "\n") for row in tasks]
    colors = [COLORS[OURS] if row["cpu_ratio"]["median"] >= 1 else WARM for row in tasks]
    bars(saved, names, [row["cpu_ratio"] for row in tasks], colors, "{:.2f}")
    saved.axhline(1, color="#222222", linewidth=0.8)
    saved.set_title("times faster, CPU seconds")
    for row in tasks:
        drafted, accepted = summed(row["drafted"]), summed(row["accepted"])
        shares = [a / d for a, d in zip(accepted, drafted, strict=True) if d >= LEAST_DRAFTS]
        if shares:
            places.plot(range(1, len(shares) + 1), shares, marker="o", label=row["name"])
    places.set(
        title="share of drafts drawn, by position", ylim=(0, 1.05), xlabel="position in its step"
    )
    places.xaxis.get_major_locator().set_params(integer=True)
    places.legend(fontsize=7.5)
    costs = next(row for row in rows if "rows" in row)
    steps.plot(costs["rows"], [1e3 * each for each in costs["seconds"]], marker="o")
    steps.set(title="ms of a step, by rows", xscale="log", xlabel="rows", ylim=0)
    steps.set_xticks(ticks := [1, 2, 4, 8, 16, 32, 64], labels=map(str, ticks))
    return figure


def summed(counts: dict[str, list[int]]) -> list[int]:
    """Return sums by position over all sources."""
    return [sum(each) for each in zip_longest(*counts.values(), fillvalue=0)]


DRAWN: dict[str, Callable[[Path], Any]] = {
    "peers": peers,
    "peers-qwen3": peers_of_qwen,
    "bound": share_of_bound,
    "host": host,
    "exactness": exactness,
    "serve": server,
    "drafts": drafts,
}
