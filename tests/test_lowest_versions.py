"""The lowest versions allowed by pyproject.toml work in a separate environment.

torch and the extras that bring it have no row: its right build depends on the machine, so
`make ... TORCH=` chooses it for all tests.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Extras ("" for what is always installed) -> the tests that depend on these packages most.
TESTS = {
    ("server",): [
        f"tests/{name}.py"
        for name in (
            *("server/http/test_connection", "server/http/test_bodies", "server/test_gateways"),
            *("server/test_exchange", "server/test_silence", "server/http/test_metrics"),
            *("remote/test_messages", "remote/test_engine_sockets"),
            "server/api/openai/test_openai_model",
        )
    ],
    ("", "data", "parallel", "plots"): [
        *(
            "tests/test_config.py",
            "tests/test_types.py",
            "tests/data/test_data.py",
            "tests/core/test_batch.py",
        ),
        *(
            "tests/checkpoints/test_loading.py",
            "tests/models/test_spec.py",
            "tests/models/test_quantised.py",
        ),
        *(
            "tests/text/test_control_tokens.py",
            "tests/text/test_output_text.py",
            "tests/text/test_tool_history.py",
        ),
        *(
            "tests/engine/test_groups.py",
            "tests/weights/test_weight_sync.py",
            "tests/ranks/test_rank_samples.py",
        ),
        *("tests/cli/test_info.py", "tests/rl/test_report.py"),
    ],
    ("outlines", "xgrammar"): [
        "tests/structured/test_agreement.py",
        "tests/structured/test_grammar.py",
        "tests/structured/test_plain_schema.py",
    ],
    ("gguf",): [
        "tests/checkpoints/test_gguf.py",
        "tests/checkpoints/test_gguf_families.py",
        "tests/checkpoints/test_gguf_llama3.py",
        "tests/checkpoints/test_gguf_tokenizer.py",
    ],
}
# These tests use transformers, which needs a newer huggingface_hub than ours.
LEFT_OUT = (
    "tests/cli/test_info.py::test_info_counts_blocks_that_are_the_default",
    "tests/models/test_quantised.py::test_gpt_oss_experts_are_read_from_blocks",
)
# Other requirements, including torch, come from the current environment.
ALONE = {("outlines", "xgrammar")}


def lowest(extras: tuple[str, ...]) -> list[str]:
    """Return the requirements at the lower end of their ranges."""
    optional = PROJECT["optional-dependencies"]
    wanted = [
        each for extra in extras for each in (optional[extra] if extra else PROJECT["dependencies"])
    ]
    return [
        re.sub(r"^([\w.-]+)>=([\w.]+)[^;]*", r"\1==\2", each)
        for each in wanted
        if not each.startswith(("torch>=", "nano-inference[train]"))
    ]


@pytest.mark.parametrize("extras", TESTS, ids=" ".join)
def test_range_begins_with_its_lowest_version(extras: tuple[str, ...]) -> None:
    assert all("==" in each and ">" not in each and "," not in each for each in lowest(extras))


def test_packages_of_the_single_machine_extra_are_all_tested() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert {*re.findall(r"[a-z]+", everything.partition("[")[2]), ""} <= {
        name for extras in TESTS for name in extras
    }


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the lowest versions are those of the oldest Python"
)
@pytest.mark.parametrize("extras", TESTS, ids=" ".join)
def test_lowest_versions_work(tmp_path: Path, extras: tuple[str, ...]) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", *lowest(extras)]
    subprocess.run([*install, *(["--no-deps"] if extras in ALONE else [])], check=True)
    # Other packages come from the current environment, after the installed ones.
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    here = [str(ROOT / "src"), *(each for each in sys.path if each.endswith("site-packages"))]
    (packages / "elsewhere.pth").write_text("\n".join(here))
    process = subprocess.run(
        [
            python,
            "-W",
            "ignore",
            "-m",
            "pytest",
            "-q",
            "-W",
            "ignore",
            "-p",
            "no:cacheprovider",
            *(f"--deselect={test}" for test in LEFT_OUT),
            *TESTS[extras],
        ],
        cwd=ROOT,
        # plugins need newer versions of the same packages
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
