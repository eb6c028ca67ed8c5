"""A conversation in the terminal: messages, settings and slash commands. The caller passes the
function that answers.
"""

import json
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from rich.text import Text

from nano_inference.cli.options import PARAMS
from nano_inference.cli.terminal import (
    Interruptible,
    errors,
    has_colors,
    keys_for_later,
    output,
    printable,
    read_file,
    write,
    write_file,
)
from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.system.http_client import Piece, ServerError, Usage
from nano_inference.types import SamplingParams

Messages: TypeAlias = list[dict[str, str]]
Pieces: TypeAlias = Generator[Piece, None, None]
QUOTES = '"""'  # around a message of several lines
_SETTABLE = tuple(name for name in PARAMS if name != "stop")


@dataclass
class Session:
    """A conversation.

    Attributes:
        answer: Function that streams an answer of at most `params.max_tokens` tokens, fewer if
            the context ends.
        params: Sampling parameters.
        chosen: Names of the parameters that the user set.
        system: System message, or None.
        history: Messages after the system message.
        interactive: True if a person types the lines.
    """

    answer: "Callable[[Messages, Session], Pieces]"
    params: SamplingParams
    chosen: set[str]
    system: str | None = None
    history: Messages = field(default_factory=Messages)
    interactive: bool = field(default_factory=lambda: sys.stdin.isatty())

    def run(self) -> None:
        """Read and answer lines until the input ends or `/exit`."""
        if self.interactive:
            self._say("Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands.\n")
        read = _line_reader() if self.interactive else _read_pipe
        while (line := self._next_message(read)) is not None:
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    if not self._command(*line.split(maxsplit=1)):
                        return
                else:
                    self._answer(line)
            except (InvalidRequest, ConfigError, ServerError) as problem:
                if not self.interactive:
                    raise
                errors.print(Text(f"error: {problem}", style="red"), soft_wrap=True)

    def _next_message(self, read: "_Read") -> str | None:
        """Return the next line, or the lines between triple quotes, or None at the end of input."""
        line = self._next_line(read, ">>> ")
        if line is None or not line.startswith(QUOTES):
            return line
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            more = self._next_line(read, "... ")
            if more is None:
                raise InvalidRequest(f"the message has no end; end it with {QUOTES}.")
            lines.append(more)
        return "\n".join(lines).rstrip().removesuffix(QUOTES)

    def _next_line(self, read: "_Read", prompt: str) -> str | None:
        """Return the next line, or None at the end of input."""
        while True:
            try:
                return read(prompt).rstrip("\r\n")
            except EOFError:
                if self.interactive:
                    errors.print()
                return None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self._say("\nPress Ctrl-D or type /exit to leave.")

    def _command(self, name: str, rest: str = "") -> bool:
        """Run a slash command. Return False for `/exit`."""
        name = _OTHER_NAMES.get(name, name)
        if name == "/exit":
            return False
        command = _COMMANDS.get(name)
        if command is None:
            raise InvalidRequest(
                f"unknown command {name}; /help lists the commands. To send the line as a message, "
                "begin it with a space."
            )
        command.obey(self, rest.strip())
        return True

    def _say(self, text: str) -> None:
        """Print a line if a person is typing."""
        if self.interactive:
            errors.print(text, style="dim", markup=False)

    # -- commands ----------------------------------------------------------------------------------

    def clear(self, _: str) -> None:
        """Delete all messages but the system message."""
        self.history.clear()
        self._say("Conversation cleared.\n")

    def set_system(self, text: str) -> None:
        """Set or remove the system message."""
        self.system = text or None
        self._say(f"System message {'set' if text else 'removed'}.\n")

    def set(self, rest: str) -> None:
        """Run `/set system TEXT` or `/set parameter NAME VALUE`."""
        target, _, rest = rest.partition(" ")
        if target == "system":
            self.set_system(rest.strip())
            return
        name, _, value = rest.strip().partition(" ")
        if target != "parameter" or not value.strip():
            raise InvalidRequest(
                "unknown setting; write /set parameter NAME VALUE, or /set system TEXT."
            )
        if name not in _SETTABLE:
            raise InvalidRequest(
                f"unknown parameter {name!r}; choose one of {', '.join(_SETTABLE)}."
            )
        self.params = replace(self.params, **{name: _number(name, value.strip())})
        self.chosen.add(name)
        self._say(f"{name} set to {getattr(self.params, name)}.\n")

    def show(self, _: str) -> None:
        """Print the system message, the number of messages, and the parameters."""
        rows = {
            "system": "none" if self.system is None else self.system,
            "messages": str(len(self.history)),
            **{
                name: str(getattr(self.params, name))
                for name in _SETTABLE
                if name in self.chosen or name in ("temperature", "top_p", "max_tokens")
            },
        }
        for name, value in rows.items():
            errors.print(f"{name:<20}{printable(value)}", markup=False, soft_wrap=True)

    def save(self, name: str) -> None:
        """Write the conversation to a JSON file."""
        if not name:
            raise InvalidRequest("the file is missing; write /save FILE.")
        saved = {"system": self.system, "messages": self.history}
        write_file(_path(name), json.dumps(saved, ensure_ascii=False, indent=1) + "\n")
        self._say(f"Saved {len(self.history)} messages.\n")

    def load(self, name: str) -> None:
        """Replace the conversation with the one in a file."""
        if not name:
            raise InvalidRequest("the file is missing; write /load FILE.")
        self.system, self.history = _read_conversation(_path(name))
        self._say(f"Loaded {len(self.history)} messages.\n")

    def help(self, _: str) -> None:
        """List the commands."""
        for command in _COMMANDS.values():
            errors.print(f"{command.usage:<31}{command.meaning}", markup=False, soft_wrap=True)
        errors.print(f"{QUOTES:<31}begin and end a message of several lines", markup=False)

    # -- answers -----------------------------------------------------------------------------------

    def _answer(self, line: str) -> None:
        """Stream the answer to a message. A stopped answer keeps its partial text."""
        message = {"role": "user", "content": line.strip()}
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages = [*first, *self.history, message]
        said: list[str] = []
        usage: Usage | None = None
        is_cut = False
        start = time.perf_counter()
        keys = keys_for_later() if self.interactive else nullcontext()
        with keys, Interruptible(self.answer(messages, self)) as pieces:
            for piece in pieces:
                if piece.reasoning:
                    self._think(piece.reasoning)
                if piece.text:
                    write(piece.text)
                    said.append(piece.text)
                usage = piece.usage or usage
                is_cut = is_cut or piece.finish_reason == "length"
        write("\n")
        if said:
            self.history += [message, {"role": "assistant", "content": "".join(said)}]
        seconds = time.perf_counter() - start
        self._say(f"{figures(usage, seconds, is_cut=is_cut, stopped=pieces.stopped)}\n")

    def _think(self, text: str) -> None:
        """Show the model's reasoning, which does not join the history."""
        if self.interactive:
            errors.print(Text(printable(text), style="dim"), end="", soft_wrap=True)


@dataclass(frozen=True)
class _Command:
    """Row of the table of commands."""

    usage: str
    meaning: str
    obey: Callable[[Session, str], None]


_COMMANDS: Mapping[str, _Command] = {
    each.usage.split()[0]: each
    for each in (
        _Command("/clear", "start a new conversation (or: /reset)", Session.clear),
        _Command(
            "/system TEXT", "set the system message, or remove it without TEXT", Session.set_system
        ),
        _Command(
            "/set parameter NAME VALUE", "set temperature, top_p, seed, max_tokens …", Session.set
        ),
        _Command("/show", "show the system message and the parameters", Session.show),
        _Command("/save FILE", "save the conversation", Session.save),
        _Command("/load FILE", "load a saved conversation", Session.load),
        _Command("/exit", "leave, as Ctrl-D does (or: /bye)", lambda *_: None),
        _Command("/help", "show this list (or: /?)", Session.help),
    )
}
_OTHER_NAMES = {"/reset": "/clear", "/bye": "/exit", "/quit": "/exit", "/?": "/help"}


def figures(usage: Usage | None, seconds: float, *, is_cut: bool, stopped: bool) -> str:
    """Return the line below an answer: tokens, speed, and cached prompt tokens."""
    if usage is None:
        return "stopped" if stopped else "the server reported no usage"
    tokens, cut = usage.completion_tokens, " (cut off)" if is_cut else ""
    a_step = f", {tokens / usage.num_steps:.2f} tokens per step" if usage.num_steps else ""
    return (
        f"{tokens} tokens{cut}, {tokens / max(seconds, 1e-9):,.1f} tok/s{a_step}; "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
    )


def _path(name: str) -> Path:
    return Path(name).expanduser()


def _number(name: str, text: str) -> float | None:
    """Return a parameter's value from its text. Raises `InvalidRequest`."""
    kinds = {each.name: each.type for each in fields(SamplingParams)}
    if kinds[name] == int | None and text == "none":
        return None
    is_whole = kinds[name] is not float
    try:
        return int(text) if is_whole else float(text)
    except ValueError:
        kind = "a whole number" if is_whole else "a number"
        raise InvalidRequest(f"{name} must be {kind}; got {text!r}.") from None


def _read_conversation(file: Path) -> tuple[str | None, Messages]:
    """Return the system message and the other messages of a saved conversation. Raises
    `InvalidRequest`.
    """
    text = read_file(file)
    try:
        said: Any = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise InvalidRequest(f"{file} is not a saved conversation: {problem}.") from None
    system = said.get("system") if isinstance(said, dict) else 0
    messages: Any = said.get("messages") if isinstance(said, dict) else None
    if not isinstance(system, str | None) or not _are_messages(messages):
        raise InvalidRequest(f"{file} is not a saved conversation; load a file that /save wrote.")
    return system, messages


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(each, dict)
        and each.keys() == {"role", "content"}
        and all(isinstance(value, str) for value in each.values())
        for each in messages
    )


_Read: TypeAlias = Callable[[str], str]


def _read_pipe(_: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _line_reader() -> _Read:
    """Return `input` with readline's line editing, and completion of commands."""
    try:
        import readline
    except ImportError:
        return input
    readline.set_completer_delims("\n")
    readline.set_completer(_complete)
    uses_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if uses_libedit else "tab: complete")
    if not has_colors(output):
        return input
    # readline counts no width for characters between \x01 and \x02
    return lambda prompt: input(f"\x01\x1b[1;36m\x02{prompt.strip()}\x01\x1b[0m\x02 ")


def _complete(text: str, state: int) -> str | None:
    """Return completion number `state` of a line, as readline calls it."""
    return dict(enumerate(completions(text))).get(state)


def completions(line: str) -> list[str]:
    """Return the completions of a slash command: commands, and parameters of `/set`."""
    known = [*_COMMANDS, *_OTHER_NAMES, "/set system "]
    known += [f"/set parameter {name} " for name in _SETTABLE]
    return [each for each in known if line.startswith("/") and each.startswith(line)]
