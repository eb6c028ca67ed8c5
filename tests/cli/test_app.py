"""Behavior of every command: help, errors, exit codes and shell options."""

import errno
import inspect
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter

import nano_inference
from nano_inference import InferenceEngine
from nano_inference.__main__ import THRESHOLDS
from nano_inference.cli.field_options import parse_size, with_flags
from nano_inference.cli.main import COMMANDS, exit_code, load_command
from nano_inference.errors import (
    AdapterError,
    ConfigError,
    EngineDead,
    ModelLoadError,
    RequestTooLarge,
)
from nano_inference.system.http_client import ServerError
from tests.cli.running import ENTRY, FAST, finish, run, spawn


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
        ["train", "-h"],
        ["runs", "-h"],
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "./nofile.gguf", "-p", "x"],
        ["generate", "-p", "x", "smollm2-135n"],
        ["generate", "smollm2-135m", "-p", "x", "--max-tokens", "0"],
        ["generate", "smollm2-135m", "-p", "x", "--device", "mps"],
        ["generate", "smollm2-135m", "-p", "x", "--dtype", "int3"],
        ["generate", "smollm2-135m", "-p", "x", "--draft-model", "./nofolder"],
        ["chat", "./nofile.gguf"],
        ["serve", "./nofile.gguf"],
        ["serve", "smollm2-135m", "--port", "-1"],
        ["generte"],
    ],
)
def test_wrong_usage_is_reported_before_torch_is_imported(
    arguments: list[str],
) -> None:
    code = (
        "import sys\nfrom nano_inference.cli import app\n"
        f"try: app({arguments!r})\nexcept SystemExit as end: assert end.code == 2, end.code\n"
        "heavy = {'torch', 'nano_bench.command', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "Errno" not in done.stderr


def test_command_imports_no_other() -> None:
    code = (
        "import sys\nfrom nano_inference.cli.main import load_command\nload_command('info')\n"
        "names = [name for name in sys.modules if name.startswith('nano_inference.cli.')]\n"
        "assert not {'bench', 'chat', 'serve', 'generate'} & {n.split('.')[2] for n in names}, names"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["generate", "chat", "serve"])
def test_help_shows_common_options_and_help_all_every_option(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    short, whole = run(name, "--help"), run(name, "--help-all")
    assert (short.exit_code, whole.exit_code) == (0, 0)
    flags = {param.opts[0] for param in load_command(name).params if param.opts[0].startswith("-")}

    def listed(text: str) -> set[str]:
        return {each for each in flags if re.search(rf"^│[ *]+{each}\b(?!-)", text, re.MULTILINE)}

    shown = listed(short.stdout)
    assert 15 <= len(shown) <= 30
    assert listed(whole.stdout) == flags
    missing = len(flags) - len(shown)
    assert f"{missing} more options: nano-inference {name} --help-all" in short.stdout
    assert "more options" not in whole.stdout


def test_common_options_exist() -> None:
    for name, row in COMMANDS.items():
        names = {param.name for param in load_command(name).params}
        assert {*row.common} <= names, name


@pytest.mark.thorough(cases=["generate FOLDER -p x -m 4 --json"])
@pytest.mark.parametrize(
    "words",
    [
        "generate FOLDER -p x -m 4",
        "generate FOLDER -p x -m 4 --json",
        "generate --help",
        "--version",
    ],
)
def test_full_disk_is_one_line(folders: dict[str, str], words: str) -> None:
    command = [folders["chat"] if word == "FOLDER" else word for word in words.split()]
    if "FOLDER" in words:
        command += FAST
    with open("/dev/full", "w") as full:
        done = subprocess.run([*ENTRY, *command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert lines == ["error: cannot write the output: No space left on device"], done.stderr


@pytest.mark.thorough
def test_closed_pipe_ends_the_command_quietly(folders: dict[str, str]) -> None:
    process = spawn("generate", folders["base"], "-p", "x", "-n", "300", "-m", "300", *FAST)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    with process.stderr, process.stdin or nullcontext():
        output = process.stderr.read()
    assert process.wait(timeout=120) == 128 + signal.SIGPIPE
    assert "Traceback" not in output
    assert "rror" not in output


@pytest.mark.thorough
def test_text_is_utf_8_if_the_locale_has_only_ascii(folders: dict[str, str]) -> None:
    words = ["generate", folders["base"], "-p", "é", "-m", "40", "--seed", "1", "--ignore-eos"]
    outputs = [
        subprocess.run(
            [*ENTRY, *words, *FAST],
            capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": encoding},
            timeout=120,
        )
        for encoding in ("ascii", "utf-8", "latin-1")
    ]
    assert outputs[0].stdout == outputs[1].stdout
    assert not outputs[0].stdout.isascii()
    assert b"Characters outside latin-1 are printed as question marks" in outputs[2].stderr
    assert b"question marks" not in outputs[0].stderr


def test_module_is_the_command() -> None:
    command = [sys.executable, "-m", "nano_inference", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (
        0,
        f"nano-inference {nano_inference.__version__}",
    ), done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_examples_use_existing_options(name: str) -> None:
    help_text = inspect.cleandoc(load_command(name).help or "")
    assert help_text.splitlines()[0] == COMMANDS[name].summary
    lines = help_text.partition("Examples:")[2].splitlines()
    calls = [line.partition("nano-inference ")[2] for line in lines if line.strip()]
    assert any(call.startswith(name) for call in calls)
    for call in calls:
        words = shlex.split(call.partition(" > ")[0])
        known = {flag for param in load_command(words[0]).params for flag in param.opts}
        assert {word for word in words[1:] if word.startswith("-")} <= known, call


def test_console_script_runs_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"]
    run = EntryPoint("nano-inference", scripts["nano-inference"], "console_scripts").load()
    calls: list[Any] = []
    monkeypatch.setattr("nano_inference.cli.app", lambda **options: calls.append(options))
    monkeypatch.setattr("gc.set_threshold", lambda *numbers: calls.append(numbers))
    run()
    assert calls == [THRESHOLDS, {"prog_name": "nano-inference"}]


def test_public_names_that_need_torch_are_imported_lazily() -> None:
    assert nano_inference.InferenceEngine is InferenceEngine
    assert "InferenceEngine" in dir(nano_inference)
    with pytest.raises(AttributeError, match="nothing"):
        nano_inference.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def raised(problem: Exception, cause: Exception) -> Exception:
    problem.__cause__ = cause
    return problem


@pytest.mark.thorough(cases=[])
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate", "MODEL", "-p", "x", "--top-p", "3"], 2, "--top-p 3.0 must be"),
        (["generate", "MODEL", "-p", "x", "--temperature", "hot"], 2, "'hot' is not a number."),
        (["generate", "MODEL", "-p", "x", "--top-k", "1.5"], 2, "'1.5' is not a whole number."),
        (["generate", "MODEL", "-p", "x", "-m", "x.gguf"], 2, "For the model, use --model"),
        (["generate", "MODEL", "-p", "x", "--max-tokens", "0"], 2, "--max-tokens 0 must be"),
        (["generate", "MODEL", "-p", "x", "--tokenizer", "./nowhere"], 2, "no such folder"),
        (["generate", "MODEL", "--model", "MODEL", "-p", "x"], 2, "give one"),
        (["generate", "MODEL", "-p", "x", "--quantization", "q4_0"], 2, "such as q4_0, use file."),
        (["serve", "-m", "./no.gguf"], 2, "./no.gguf: no such file."),
        (["serve", "--model", "MODEL", "--port", "99999"], 2, "99999 is not in the range"),
        (["chat", "--model", "./no.gguf"], 2, "./no.gguf: no such file."),
        (["generate", "--url", "http://x", "-f", "no-such-file"], 2, "no-such-file: no such file."),
        (["draft-heads", "MODEL", "no-such-file", "x"], 2, "'no-such-file' does not exist"),
        (
            ["generate", "MODEL", "-p", "x", "--max-tokens", "99999"],
            2,
            "exceed --max-model-len 60000; --max-tokens",
        ),
        (["generate", "MODEL", "-p", "x", "--kv-cache-memory", "1"], 2, "--kv-cache-memory of 1 "),
        (["generate", "MODEL", "-p", "x", "--json-schema", "{no"], 2, "--json-schema: "),
        (["generate", "pyproject.toml", "-p", "x"], 2, "neither a folder nor a .gguf"),
        (["generate", "/no/such/folder.gguf", "-p", "x"], 2, "folder.gguf: no such file."),
        (["info", "pyproject.toml"], 2, "neither a folder nor a .gguf"),
        (["generate", "MODEL", "-p", "x", "--device", "tpu"], 2, "--device tpu is not supported"),
        (["run", "MODEL"], 2, "Did you mean 'chat'?"),
        (
            ["complete", "--url", "http://x", "-p", "x"],
            2,
            "No such command 'complete'. Did you mean 'generate --url'?",
        ),
        (
            ["generate", "--url", "http://x", "-p", "x", "-n", "2"],
            2,
            "--num-samples requires a local engine",
        ),
        (
            ["generate", "--url", "http://x", "-p", "x", "--logprobs"],
            2,
            "--logprobs requires a local engine",
        ),
        (
            ["generate", "--url", "http://x", "-p", "x", "--dtype", "float32"],
            2,
            "--dtype requires a local engine",
        ),
        (["generate", "--url", "http://x", "-p", "x", "-p", "y"], 2, "give -p once"),
        (
            ["generate", "MODEL", "-p", "x", "--api-key-file", "k"],
            2,
            "--api-key-file requires a server (--url)",
        ),
        (["generate", "MODEL"], 2, "the prompt is missing"),
        (["generate"], 2, "MODEL"),
        (["generate", "MODEL", "-p", "x", "--cache-type", "heap"], 2, "heap"),
        (["generate", "MODEL", "-p", "x", "-n", "0"], 2, "--num-samples"),
        (["generate", "MODEL", "-p", "x", "--kv-cache-memory", "2 bananas"], 2, "bananas"),
        (
            ["generate", "MODEL", "-p", "x", "--file", "no-such-file"],
            2,
            "no-such-file: no such file.",
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
    # a box may break lines between any two words
    assert words in " ".join(result.stderr.replace("│", "").split())
    assert "Traceback" not in result.output
    assert result.stdout == ""
    told = [line for line in result.stderr.splitlines() if not line.startswith("sampling")]
    assert len(told) == 1 or "Usage:" in told[0]


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (ConfigError("a"), 2),
        (ModelLoadError("a"), 2),
        (RequestTooLarge("a"), 2),
        (AdapterError("a"), 2),
        (ServerError("a"), 1),
        (EngineDead("a"), 1),
        (MemoryError(), 1),
        (raised(ConfigError("a"), FileNotFoundError()), 2),
        (raised(ConfigError("a"), PermissionError()), 1),
        (raised(ModelLoadError("a"), OSError(errno.ENOSPC, "full")), 1),
    ],
)
def test_exit_code_is_2_for_input_that_the_caller_can_correct(
    problem: Exception, code: int
) -> None:
    assert exit_code(problem) == code


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("top_p=3.0 must be below 1.", "--top-p 3.0 must be below 1."),
        ("give kv_cache_memory of at least 9 bytes", "give --kv-cache-memory of at least 9 bytes"),
        ("raise EngineConfig.max_model_len.", "raise --max-model-len."),
        ("dtype='auto' needs dtype", "--dtype auto needs dtype"),
        ("enable_prefix_caching=False is slow", "--no-prefix-caching is slow"),
        ("enable_prefix_caching=True", "--prefix-caching"),
        ("/data/max_model_len/x, max_model_lens", "/data/max_model_len/x, max_model_lens"),
    ],
)
def test_errors_name_options_in_place_of_fields(text: str, shown: str) -> None:
    command: Any = load_command("serve")
    flags = {**command.flags, "top_p": ("--top-p", None)}
    assert with_flags(text, flags) == shown


def test_error_of_memory_is_one_line(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("nano_inference.cli.info._plans", lacks)
    result = run("info", folders["chat"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: out of memory; use a smaller")
    assert result.stderr.count("\n") == 1


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
def test_size_rejects_other_texts(text: str) -> None:
    with pytest.raises(BadParameter, match="is not a size"):
        parse_size(text)


def test_verbose_may_stand_before_the_command(folders: dict[str, str]) -> None:
    assert run("-v", "info", folders["bare"]).exit_code == 0
    assert logging.getLogger("nano_inference").level == logging.INFO
    assert run("info", folders["bare"]).exit_code == 0
    assert logging.getLogger("nano_inference").level == logging.WARNING


@pytest.mark.parametrize("columns", ["60", "80", "160"])
def test_help_all_writes_whole_names_of_options(columns: str) -> None:
    command = [*ENTRY, "serve", "--help-all"]
    environment = {**os.environ, "COLUMNS": columns}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    for name in ("--weight-update-group-world-size", "--gpu-memory-utilization"):
        assert name in shown.stdout
