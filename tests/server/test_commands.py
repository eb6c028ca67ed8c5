"""The commands that speak HTTP, against our own server."""

import json
import urllib.request

import pytest

from tests.cli.running import run


@pytest.mark.thorough
def test_generate_shows_the_servers_answer(server: str) -> None:
    body = {"prompt": "The sky is blue because", "max_tokens": 12, "temperature": 0}
    with urllib.request.urlopen(f"{server}/v1/completions", json.dumps(body).encode()) as answer:
        whole = json.load(answer)["choices"][0]["text"]
    result = run(
        "generate",
        "--url",
        server,
        "-p",
        "The sky is blue because",
        "-m",
        "12",
        "-t",
        "0",
        "--top-k",
        "4",
    )
    assert (result.exit_code, result.stdout) == (0, whole + "\n"), result.stderr
    assert "12 tokens" in result.stderr


@pytest.mark.thorough
def test_chat_talks_to_the_server_and_fits_its_answers(server: str) -> None:
    lines = "My name is Ada.\nWhat is my name?\n" + "word " * 980 + "\n"
    result = run("chat", "--url", server, "-t", "0", "-m", "24", stdin=lines)
    # the third message exceeds the context, and piped input ends at the first error
    assert result.exit_code == 2
    assert "tokens of at most 1024, which leaves no room for an answer; /clear" in result.stderr
    assert len(result.stdout.strip()) > 20


@pytest.mark.thorough
def test_model_that_is_not_served_is_named(server: str) -> None:
    result = run("generate", "--url", server, "-p", "x", "--model", "gpt-9")
    assert result.exit_code == 2
    assert "gpt-9" in result.stderr
    assert result.stderr.count("\n") == 1
