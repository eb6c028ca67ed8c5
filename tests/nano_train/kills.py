"""Kill a run with -9 again and again, and compare its end with that of a quiet run.

`python -m tests.nano_train.kills [RUN.toml] [--kills 20] [--seed 0] [--events 20]` does this for a tiny run, or for
yours. A life ends when a number of files, drawn from the seed, have appeared or grown.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from nano_train.checkpoints import Checkpoints
from nano_train.tree import RunFolder
from tests.nano_train.tiny import files_of, tiny_run

MOST_EVENTS = 20  # of a life
PAUSE = 0.001  # seconds between two looks


def spawn(
    file: Path, out: Path, *options: str, other_processor: bool = False
) -> "subprocess.Popen[bytes]":
    """Begin or resume a run in a process."""
    module = "tests.nano_train.other_processor" if other_processor else "nano_inference"
    changes = {"ATEN_CPU_CAPABILITY": "default"} if other_processor else {}
    command = [sys.executable, "-W", "ignore", "-m", module, "train", str(file)]
    return subprocess.Popen(
        [*command, "--out", str(out), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | changes,
    )


def finish(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the end of a run that must succeed."""
    _, problem = process.communicate()
    assert process.returncode == 0, problem.decode()[-4000:]


def events_of(out: Path) -> set[tuple[str, int]]:
    """Return the files of a run with their sizes."""
    events: set[tuple[str, int]] = set()
    for folder, folders, files in os.walk(out):  # omits folders that vanish meanwhile
        for path in (Path(folder) / name for name in (*folders, *files)):
            try:
                events.add((str(path.relative_to(out)), path.stat().st_size))
            except FileNotFoundError:  # removed or renamed meanwhile
                continue
    return events


def life(file: Path, out: Path, most: int, *options: str) -> str | None:
    """Let a run live for this many events, then kill it. Return the file of the last event, or None
    if the run ended before.
    """
    seen, last, count = events_of(out), "", 0
    process = spawn(file, out, *options)
    while process.poll() is None and count < most:
        new = events_of(out) - seen
        seen |= new
        count += len(new)
        last = max(new)[0] if new else last
        time.sleep(PAUSE)
    if process.poll() is not None:
        finish(process)
        return None
    process.kill()
    process.communicate()
    return last


def kill_often(
    file: Path, out: Path, kills: int, seed: int, *options: str, most: int = MOST_EVENTS
) -> list[str]:
    """Kill a run this many times, then let it end. Return the file of the last event of each life."""
    rng, lasts = random.Random(seed), list[str]()
    for _ in range(kills):
        last = life(file, out, rng.randint(1, most), *options)
        if last is None:
            break
        lasts.append(last)
    finish(spawn(file, out, *options))
    return lasts


def state_of(out: Path) -> dict[str, Any]:
    """Return the last checkpoint's state.json."""
    checkpoints = Checkpoints(RunFolder(out), "")
    return checkpoints.about(checkpoints.steps()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, default=MOST_EVENTS, help="maximum of a life")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    changes = [part for pair in options.set for part in ("--set", pair)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = options.file or killed_run(folder / "task")
        finish(spawn(file, folder / "quiet", *changes))
        lasts = kill_often(
            file, folder / "killed", options.kills, options.seed, *changes, most=options.events
        )
        print(f"{len(lasts)} kills, the last event of each life by folder or file:")
        print(json.dumps(Counter(last.partition("/")[0] for last in lasts)))
        quiet, killed = state_of(folder / "quiet"), state_of(folder / "killed")
        print(f"quiet  {quiet['parameters_sha256']}\nkilled {killed['parameters_sha256']}")
        if files_of(folder / "quiet") != files_of(folder / "killed"):
            sys.exit("The files differ.")
        print("All files are the same.")


def killed_run(folder: Path) -> Path:
    """Write a run that is long enough for 20 kills."""
    return tiny_run(folder, steps=32, every=1)


if __name__ == "__main__":
    main()
