"""The lowest versions that `nano-inference[server]` allows serve too: installed into an environment of their own."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What depends on these packages most: uvicorn's protocol, pydantic's models, msgspec's messages, sockets, metrics.
TESTS = (
    "connection",
    "bodies",
    "gateways",
    "exchange",
    "silence",
    "messages",
    "engine_sockets",
    "metrics",
    "openai_model",
)


def lowest(extra: str) -> list[str]:
    """The requirements of an extra, each at the lower end of its range."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    return [re.sub(r"^([\w.-]+)>=([\w.]+)[^;]*", r"\1==\2", each) for each in wanted]


def test_a_range_begins_with_its_lowest_version() -> None:
    assert all("==" in each and ">" not in each and "," not in each for each in lowest("server"))


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lowest versions are those of the oldest Python")
def test_the_lowest_versions_serve(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *lowest("server")], check=True)
    # All else is taken from where this runs: what is here comes behind what was installed there.
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    here = [str(ROOT / "src"), *(each for each in sys.path if each.endswith("site-packages"))]
    (packages / "elsewhere.pth").write_text("\n".join(here))
    found = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/serving/test_{name}.py" for name in TESTS)],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # plugins want newer versions of the same packages
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
