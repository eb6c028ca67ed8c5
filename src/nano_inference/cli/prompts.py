"""Prompts from `-p`, from a text file with one per line, or from JSON lines."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nano_inference.cli.terminal import read_file
from nano_inference.errors import InvalidRequest

# text, token ids, or a conversation
Prompt = str | list[int] | list[dict[str, Any]]


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts in a file, or in standard input (`-`). Empty lines are skipped.

    A `.jsonl` file has an object per line: `{"prompt": ...}` with text or token ids, or
    `{"messages": [...]}`. In any other file each line is a prompt. Raises `InvalidRequest` with
    the number of the line.
    """
    text = read_text(path)
    read: Callable[[str, str], Prompt] = _json_prompt if path.suffix == ".jsonl" else _text_prompt
    # not splitlines: JSON may contain U+2028 unescaped
    lines = [
        (number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()
    ]
    if not lines:
        raise InvalidRequest(f"{path} has no prompts; write one per line.")
    return [read(line, f"{path}, line {number}") for number, line in lines]


def read_text(path: Path) -> str:
    """Return the text of a file, or of standard input (`-`). Raises `InvalidRequest`."""
    if str(path) != "-":
        return read_file(path)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as problem:
        raise InvalidRequest(
            f"cannot read standard input: it is not {problem.encoding} text."
        ) from problem


def as_chat(prompt: Prompt) -> Prompt:
    """Return text as the user's message of a conversation, and other prompts unchanged."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def title(prompt: Prompt) -> str:
    """Return a one-line title of a prompt."""
    if isinstance(prompt, str):
        text = prompt
    elif prompt and isinstance(prompt[-1], Mapping):
        text = str(prompt[-1].get("content"))
    else:
        text = f"{len(prompt)} token ids"
    return " ".join(text.split())


def _text_prompt(line: str, _: str) -> Prompt:
    return line.rstrip("\r")


def _json_prompt(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise InvalidRequest(f"{where} is not JSON: {problem}.") from problem
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise InvalidRequest(
            f'{where}: write an object with either "prompt" (text or token ids) or "messages".'
        )
    prompt = entry.get("prompt", entry.get("messages"))
    wanted = _is_text_or_ids if "prompt" in entry else _is_conversation
    if not prompt or not wanted(prompt):
        raise InvalidRequest(
            f'{where}: "prompt" must be text or a list of token ids, "messages" a list of '
            '{"role": ..., "content": ...}; neither may be empty.'
        )
    return prompt


def _is_text_or_ids(prompt: Any) -> bool:
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and all(type(item) is int for item in prompt)
    )


def _is_conversation(messages: Any) -> bool:
    return isinstance(messages, Sequence) and all(isinstance(message, dict) for message in messages)
