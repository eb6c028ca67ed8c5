"""`nano-inference generate --url` and `chat --url`: requests, output and failures."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import finish, run, spawn
from tests.server.scripted_http import Answer, said, scripted_http

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
MODELS = Answer(content={"data": [{"id": "first"}, {"id": "second"}]})
NOT_FOUND = Answer(404, {"error": {"message": "no such path."}})


def completions(path: str, _: Any) -> Answer:
    return {
        "/v1/models": MODELS,
        "/v1/completions": said("one ", "two", usage=USAGE, chat=False),
    }.get(path, NOT_FOUND)


def test_completion_is_written_to_stdout_and_figures_to_stderr() -> None:
    with scripted_http(completions) as seen:
        result = run("generate", "--url", seen.url, "-p", "Say it")
    assert (result.exit_code, result.stdout) == (0, "one two\n"), result.stderr
    assert "3 tokens" in result.stderr
    assert "4 of 7 prompt tokens cached" in result.stderr
    (body,) = seen.bodies("/v1/completions")
    options = {
        "max_tokens": 256,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert body == {"model": "first", "prompt": "Say it"} | options


def test_generate_sends_only_options_that_are_set(tmp_path: Path) -> None:
    key = tmp_path / "keys"
    key.write_text("\n  abc \nother\n")
    options = [
        "-t",
        "0",
        "-m",
        "5",
        "--top-k",
        "7",
        "--top-p",
        "1",
        "--seed",
        "3",
        "--stop",
        "x",
        "--stop",
        "y",
        "--model",
        "second",
    ]
    with scripted_http(completions) as seen:
        result = run(
            "generate", "--url", seen.url, *options, "--api-key-file", str(key), stdin="a\nb\n"
        )
    assert result.exit_code == 0, result.stderr
    ((_, headers, body),) = seen.requests
    assert headers["authorization"] == "Bearer abc"
    sampling = {
        "temperature": 0,
        "max_tokens": 5,
        "top_k": 7,
        "top_p": 1,
        "seed": 3,
        "stop": ["x", "y"],
    }
    assert {name: body[name] for name in body if not name.startswith("stream")} == {
        "model": "second",
        "prompt": "a\nb\n",
        **sampling,
    }


def test_whole_file_is_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("one\ntwo\n")
    with scripted_http(completions) as seen:
        assert run("generate", "--url", seen.url, "-f", str(file)).exit_code == 0
        assert run("generate", "--url", seen.url, "-f", "-", stdin="three").exit_code == 0
    assert [body["prompt"] for body in seen.bodies("/v1/completions")] == ["one\ntwo\n", "three"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("-p", "x", "-f", "y"), 2, "give one"),
        (("-f", "missing.txt"), 2, "missing.txt: no such file"),
        (("-p", ""), 2, "the prompt is empty"),
        (("-p", "x", "--top-p", "3"), 2, "--top-p 3.0 must be"),
        (("-p", "x", "--api-key-file", "missing"), 2, "cannot read missing: no such file."),
    ],
)
def test_generate_reports_wrong_usage(arguments: tuple[str, ...], code: int, words: str) -> None:
    with scripted_http(completions) as seen:
        result = run("generate", "--url", seen.url, *arguments)
    assert result.exit_code == code
    assert words in " ".join(result.stderr.replace("│", "").split())
    assert not seen.bodies("/v1/completions")


def test_missing_server_is_reported_in_one_sentence() -> None:
    for command in (("generate", "-p", "x"), ("chat",)):
        result = run(*command, "--url", "http://127.0.0.1:1", stdin="hi\n")
        assert result.exit_code == 1
        assert result.stderr.startswith(
            "error: no server is listening at http://127.0.0.1:1; start one"
        )
        assert result.stdout == ""


class Chat:
    """A server that answers with the number of the turn, and counts tokens if it has a limit."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.turn = limit, 0

    def __call__(self, path: str, body: Any) -> Answer:
        if path == "/v1/models":
            return MODELS
        if path == "/tokenize" and self.limit is not None:
            count = sum(len(message["content"]) for message in body["messages"])
            return Answer(content={"count": count, "max_model_len": self.limit, "tokens": []})
        if path == "/v1/chat/completions":
            self.turn += 1
            return said("answer ", str(self.turn), usage=USAGE)
        return NOT_FOUND


def test_chat_keeps_the_conversation() -> None:
    lines = "one\ntwo\n/system Be kind.\nthree\n/reset\nfour\n/exit\nfive\n"
    with scripted_http(Chat()) as seen:
        result = run("chat", "--url", seen.url, "--top-k", "5", stdin=lines)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "answer 1\nanswer 2\nanswer 3\nanswer 4\n"
    bodies = seen.bodies("/v1/chat/completions")
    roles = [[message["role"] for message in body["messages"]] for body in bodies]
    turn = ["user", "assistant"]
    assert roles == [
        ["user"],
        [*turn, "user"],
        ["system", *turn, *turn, "user"],
        ["system", "user"],
    ]
    assert bodies[1]["messages"][1]["content"] == "answer 1"
    assert all(
        (body["model"], body["top_k"], body["max_tokens"]) == ("first", 5, 1024) for body in bodies
    )


def test_chat_asks_for_no_more_than_fits() -> None:
    with scripted_http(Chat(limit=20)) as seen:
        result = run("chat", "second", "--url", seen.url, stdin="x" * 15 + "\n")
        assert result.exit_code == 0
        (body,) = seen.bodies("/v1/chat/completions")
        assert (body["max_tokens"], body["model"]) == (5, "second")
        result = run("chat", "second", "--url", seen.url, stdin="x" * 20 + "\n")
    assert result.exit_code == 2
    assert "of at most 20, which leaves no room for an answer; /clear" in result.stderr


def test_server_error_is_shown() -> None:
    refused = Answer(400, {"error": {"message": "the prompt is too long."}})
    with scripted_http(lambda path, _: MODELS if path == "/v1/models" else refused) as seen:
        result = run("chat", "--url", seen.url, stdin="hi\n")
    assert (result.exit_code, result.stderr) == (2, "error: the prompt is too long.\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "MODEL is missing; give one, or a server"),
        (("--url", "http://x", "--dtype", "float32"), "--dtype requires a local engine"),
        (
            ("--url", "http://x", "--max-model-len", "5"),
            "--max-model-len requires a local engine",
        ),
        (("smollm2-135m", "--api-key", "x"), "--api-key requires a server"),
    ],
)
def test_options_without_effect_are_rejected(arguments: tuple[str, ...], words: str) -> None:
    result = run("chat", *arguments, stdin="hi\n")
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_ctrl_c_ends_a_completion_and_its_connection() -> None:
    endless = Answer(events=[{"choices": [{"text": "x"}]}] * 5_000, wait=lambda: time.sleep(0.005))
    with scripted_http(lambda path, _: MODELS if path == "/v1/models" else endless) as seen:
        process = spawn("generate", "--url", seen.url, "-p", "hi")
        assert process.stdout is not None
        assert process.stdout.read(1) == "x"
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
        code, out, err = finish(process)
        assert seen.broken.wait(30.0)
    assert code == 130
    assert set(out.strip()) <= {"x"}
    assert "Traceback" not in err
