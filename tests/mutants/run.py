"""`python -m tests.mutants.run`: apply each seeded fault to a copy of the sources and expect its
tests to fail.

A test suite that passes on a broken engine proves nothing. The faults are rows of `table.py`.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.table import FAULTS, Fault

SECONDS = 400  # per fault; tests that take longer did not notice it
RED = 1  # pytest's exit code for failed tests; others mean that the tests did not run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to try; none: all")
    parser.add_argument(
        "--one-of", type=int, default=1, help="only every n-th fault; the commit decides which"
    )
    parser.add_argument("--tier", default="all", help="of tests/depth.py, to see what it notices")
    arguments = parser.parse_args()
    root = Path(__file__).parents[2]
    by_name = {fault.name: fault for fault in FAULTS}
    some = FAULTS[commit_number(root) % arguments.one_of :: arguments.one_of]
    faults = [by_name[name] for name in arguments.names] or some
    green = [fault.name for fault in faults if not turns_red(root, fault, arguments.tier)]
    if green:
        raise SystemExit(f"not caught: {', '.join(green)}")
    print(f"{len(faults)} passed, 0 failed")


def apply(fault: Fault, root: Path) -> None:
    """Edit the sources below `root`.

    Raises:
        ValueError: an edit's `old` does not occur exactly once.
    """
    for edit in fault.edits:
        path = root / edit.file
        text = path.read_text(encoding="utf-8")
        if text.count(edit.old) != 1:
            raise ValueError(f"{fault.name}: {text.count(edit.old)} places in {edit.file}, not 1")
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def commit_number(root: Path) -> int:
    """Return a number that rarely repeats between commits, or 0 outside of a git checkout."""
    process = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return int(process.stdout.strip() or "0", 16)


def turns_red(root: Path, fault: Fault, tier: str = "all") -> bool:
    """Return whether the tests of a fault fail on a copy that has it."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("src", "tests"):
            shutil.copytree(root / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(root / "pyproject.toml", copy)
        apply(fault, copy)
        # Kernels with a fault are built in the copy. All others come from the home folder.
        in_kernels = any("/kernels/" in edit.file for edit in fault.edits)
        home = copy if in_kernels else Path.home()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
        ]
        command += ["--tier", tier, "--hypothesis-profile=mutants", *shlex.split(fault.seen_by)]
        try:
            done = subprocess.run(
                command,
                cwd=copy,
                env={
                    "PATH": "/usr/bin:/bin",
                    "PYTHONPATH": f"{copy / 'src'}:{copy}",
                    "HOME": str(home),
                },
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            caught, how = done.returncode == RED, _last_failure(done.stdout)
        except subprocess.TimeoutExpired:
            caught, how = False, f"no end within {SECONDS} s; give the test a deadline"
    verdict = "red" if caught else "GREEN OR BROKEN"
    print(f"{verdict:<16} {fault.name} ({time.perf_counter() - began:.0f} s): {how}", flush=True)
    return caught


def _last_failure(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return lines[-1][:160] if lines else output[-160:].replace("\n", " ")


if __name__ == "__main__":
    main()
