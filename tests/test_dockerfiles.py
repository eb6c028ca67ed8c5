"""The container files name what exists: extras, files of the repository, options of the server."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import run

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = [ROOT / "Dockerfile", *sorted((ROOT / "docker").glob("*.Dockerfile"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_container_installs_extras_that_exist(file: Path) -> None:
    text = file.read_text()
    (extras,) = re.findall(r'/dist/\*\.whl\)\[([a-z,]+)\]"', text)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    for script in re.findall(r"python (scripts/\S+)", text):
        assert (ROOT / script).is_file()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_container_starts_a_server_with_known_options(file: Path) -> None:
    text = file.read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    assert json.loads(entry)[0] in PROJECT["scripts"]
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    name, _, *options = json.loads(command)
    asked = run(name, "--help")
    assert asked.exit_code == 0
    known = asked.stdout
    assert options.count("--host") == 1
    for option in options[::2]:
        assert option in known
    assert re.search(r"^USER 1000$", text, re.MULTILINE)
