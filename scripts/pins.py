"""Write `constraints-dev.txt`: the direct dependencies of the checks, as this interpreter has them.

Run it after `.ci/run` passed with newer versions: `.venv/bin/python scripts/pins.py`.
"""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("dev", "gguf", "server")
"""The extras that `make` installs for the checks."""
HEADER = """\
# The versions with which the checks passed last: a new release of a tool cannot turn them red.
# Users install from the ranges in pyproject.toml. `scripts/pins.py` writes this file.
"""


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"]]
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    names = {re.split(r"[^A-Za-z0-9_.-]", requirement)[0] for requirement in requirements}
    names.discard("torch")  # constraints.txt pins it, unless TORCH names another build
    pins = [f"{name}=={version(name)}\n" for name in sorted(names, key=str.lower)]
    (ROOT / "constraints-dev.txt").write_text(HEADER + "".join(pins))


if __name__ == "__main__":
    main()
