"""What holds for every command: help, errors, exit codes, options of the shell."""

import inspect
import logging
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter
from typer.main import get_command

import nano_inference
from nano_inference import InferenceEngine
from nano_inference.cli import app
from nano_inference.cli.options import parse_size
from tests.cli.running import finish, run, spawn


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["generate", "--help"],
        ["chat", "-h"],
        ["info", "-h"],
        ["models", "-h"],
        ["replay", "-h"],
        ["draft-heads", "-h"],
        ["train-service", "-h"],
        ["bench", "-h"],
        ["run-batch", "-h"],
        ["report", "-h"],
        ["--version"],
    ],
)
def test_help_and_version_need_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom nano_inference.cli import app\n"
        f"try: app({arguments!r})\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'tqdm'} & "
        "set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (nano_inference.__version__ if arguments == ["--version"] else "Usage:") in done.stdout


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "nano_inference", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (
        0,
        f"nano-inference {nano_inference.__version__}",
    ), done.stderr


COMMANDS: Any = get_command(app)


@pytest.mark.parametrize("name", COMMANDS.commands)
def test_every_help_has_examples_whose_options_exist(name: str) -> None:
    lines = inspect.cleandoc(COMMANDS.commands[name].help).partition("Examples:")[2].splitlines()
    calls = [line.partition("nano-inference ")[2] for line in lines if line.strip()]
    assert any(call.startswith(name) for call in calls)
    for call in calls:
        words = shlex.split(call.partition(" > ")[0])
        known = {flag for param in COMMANDS.commands[words[0]].params for flag in param.opts}
        assert {word for word in words[1:] if word.startswith("-")} <= known, call


def test_the_console_script_is_the_app() -> None:
    scripts = tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"]
    assert EntryPoint("nano-inference", scripts["nano-inference"], "console_scripts").load() is app


def test_public_names_that_need_torch_come_when_they_are_asked_for() -> None:
    assert nano_inference.InferenceEngine is InferenceEngine
    assert "InferenceEngine" in dir(nano_inference)
    with pytest.raises(AttributeError, match="nothing"):
        nano_inference.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate", "MODEL", "-p", "x", "--top-p", "3"], 1, "top_p=3.0 must be"),
        (["generate", "MODEL", "-p", "x", "--max-tokens", "99999"], 1, "max_model_len"),
        (["generate", "/no/such/folder.gguf", "-p", "x"], 1, "error: "),
        (["info", "pyproject.toml"], 1, "neither a folder nor a .gguf"),
        (["generate", "MODEL", "-p", "x", "--device", "tpu"], 1, "device='tpu'"),
        (["generate", "MODEL"], 2, "there is no prompt"),
        (["generate"], 2, "MODEL"),
        (["generate", "MODEL", "-p", "x", "--cache-type", "heap"], 2, "heap"),
        (["generate", "MODEL", "-p", "x", "-n", "0"], 2, "--num-samples"),
        (["generate", "MODEL", "-p", "x", "--kv-cache-memory", "2 bananas"], 2, "bananas"),
        (
            ["generate", "MODEL", "-p", "x", "--file", "no-such-file"],
            2,
            "there is no file no-such-file",
        ),
        (["generate", "MODEL", "-p", "x", "--json", "--logprobs"], 2, "--logprobs"),
        (["generate", "MODEL", "-p", "x", "--top-logprobs", "2"], 2, "--json"),
        (["cook", "MODEL"], 2, "cook"),
    ],
)
def test_errors_are_short_and_have_a_code(
    folders: dict[str, str], arguments: list[str], code: int, words: str
) -> None:
    result = run(*(folders["chat"] if word == "MODEL" else word for word in arguments))
    assert result.exit_code == code, result.output
    # a box may break lines anywhere between words
    assert words in " ".join(result.stderr.replace("│", "").split())
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert code == 2 or result.stderr.count("\n") == 1


def test_debug_shows_the_traceback(folders: dict[str, str]) -> None:
    code, _, err = finish(spawn("generate", folders["chat"], "-p", "x", "--top-p", "3", "--debug"))
    assert code == 1
    assert "Traceback" in err
    assert "InvalidRequest: top_p=3.0" in err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7),
        ("1.5 GiB", 3 * 2**29),
        ("2GiB", 2**31),
        ("3kib", 3072),
        ("4KB", 4000),
        ("5 mb", 5 * 10**6),
        ("1B", 1),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 2", "-1MB", "2Gigs", "1e9", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BadParameter, match="is not a size"):
        parse_size(text)


def test_verbose_may_stand_before_the_command(folders: dict[str, str]) -> None:
    assert run("-v", "info", folders["bare"]).exit_code == 0
    assert logging.getLogger("nano_inference").level == logging.INFO
    assert run("info", folders["bare"]).exit_code == 0
    assert logging.getLogger("nano_inference").level == logging.WARNING
