"""Plot of a load. Requires matplotlib."""

import textwrap
from pathlib import Path
from typing import Any

from nano_bench.outcomes import Load, Outcome

_COLOURS = {
    "whole answer": "#2a6fdb",
    "first token": "#e08e0b",
    "between tokens": "#2e7d4f",
    "failed": "#b3261e",
}


def draw(done: Load, title: str, file: Path) -> None:
    """Draw a load as a PNG: latencies of each request over its sending time, and the cumulative
    distribution of the latencies.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(textwrap.fill(title, 120), fontsize=9)
    over_time, waits = figure.subplots(1, 2)
    good, bad = done.good, [each for each in done.outcomes if each.error is not None]
    streamed = [each for each in good if each.first_token is not None]
    _dots(over_time, done, good, [each.ended - each.began for each in good], "whole answer")
    _dots(over_time, done, streamed, done.first_tokens, "first token")
    _dots(over_time, done, bad, [each.ended - each.began for each in bad], "failed", "x")
    over_time.set(xlabel="sending time in seconds", ylabel="seconds", yscale="log")
    for values, name in (
        (done.first_tokens, "first token"),
        (done.gaps, "between tokens"),
        ([each.ended - each.began for each in good], "whole answer"),
    ):
        if values:
            share = [(place + 1) / len(values) for place in range(len(values))]
            waits.step(
                [max(each, 1e-6) * 1e3 for each in sorted(values)],
                share,
                where="post",
                label=name,
                color=_COLOURS[name],
            )
    waits.set(xlabel="milliseconds, at most", ylabel="share", xscale="log", ylim=(0, 1))
    for axes in (over_time, waits):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(file, dpi=150, format="png")


def _dots(
    axes: Any, done: Load, outcomes: list[Outcome], values: list[float], name: str, form: str = "."
) -> None:
    if outcomes:
        times = [each.began - done.began for each in outcomes]
        axes.plot(
            times,
            [max(each, 1e-6) for each in values],
            form,
            markersize=4,
            label=name,
            color=_COLOURS[name],
        )
