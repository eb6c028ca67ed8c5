"""Compare this tree with another commit, in turns.

Run `python -m benchmarks.against COMMIT [--out FILE]`. Each tree runs its own copy of `benchmarks`:
W1 (one stream), W2 (groups), W4 (a long prompt) and the host time of a step. Each turn is a new
process. Ratios are taken turn by turn, and between the fastest turns, which other programs disturb
least. Above 1 this tree is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import processor

ROOT = Path(__file__).parents[1]
RATES = {"W1": "decode_tokens_per_s", "W2": "output_tokens_per_s", "W4": "prompt_tokens_per_s"}
TURN = """
import json
from benchmarks.ours import Options, opened, timed
with opened(Options()) as engine:
    rows = {name: timed(engine, name, 3 if name == "W1" else 1) for name in ("W1", "W2", "W4")}
print("FIGURES", json.dumps(rows))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        git("worktree", "add", "--detach", str(other), options.commit)
        try:
            for tree in (ROOT, other):  # build kernels and read files first
                turn(tree)
            turns = [{"here": turn(ROOT), "there": turn(other)} for _ in range(options.turns)]
        finally:
            git("worktree", "remove", "--force", str(other))
    report = {
        "machine": processor(),
        "cores": os.cpu_count(),
        "here": git("rev-parse", "HEAD"),
        "there": git("rev-parse", options.commit),
        "figures": {name: compared(name, turns) for name in turns[0]["here"]},
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def turn(tree: Path) -> dict[str, float]:
    """Measure a tree in new processes: tokens per second, and the host's steps per second in its
    fastest window.
    """
    printed = run(tree, "-c", TURN)
    line = next(each for each in printed.splitlines() if each.startswith("FIGURES"))
    rows: dict[str, Any] = json.loads(line.removeprefix("FIGURES"))
    figures = {f"{name} {RATES[name]}": rows[name][RATES[name]]["median"] for name in rows}
    with tempfile.NamedTemporaryFile(suffix=".json") as log:
        run(tree, "-m", "benchmarks.host", "--log", log.name)
        cases = json.loads(Path(log.name).read_text(encoding="utf-8"))["figures"]
    steps = {
        f"host: {case['case']}, {case['running']} steps_per_s": 1e6 / case["least"]
        for case in cases
    }
    return figures | steps


def run(tree: Path, *arguments: str) -> str:
    """Run Python in a tree, on its own sources. Return the output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def compared(name: str, turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    here, there = ([each[tree][name] for each in turns] for tree in ("here", "there"))
    ratios = [one / other for one, other in zip(here, there, strict=True)]
    return {
        "here": statistics.median(here),
        "there": statistics.median(there),
        "ratio": {
            "quickest": max(here) / max(there),
            "median": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        },
    }


if __name__ == "__main__":
    main()
