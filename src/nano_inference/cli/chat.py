"""`nano-inference chat`: a conversation in the terminal, with an engine of its own or with a
server.
"""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from nano_inference.cli import options
from nano_inference.cli.help_texts import HelpAll
from nano_inference.cli.options import FieldOptions
from nano_inference.cli.terminal import (
    Interruptible,
    errors,
    has_colors,
    load_engine,
    output,
    printable,
    write,
)
from nano_inference.config import EngineConfig
from nano_inference.errors import InvalidRequest
from nano_inference.serving.http_client import HttpClient, Piece, ServerError, Usage
from nano_inference.types import SamplingParams

if TYPE_CHECKING:
    from nano_inference.engine.engine import InferenceEngine

Messages = list[dict[str, str]]
Pieces = Generator[Piece, None, None]

_COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system message; without TEXT: remove it",
    "/exit": "leave, as Ctrl-D does",
    "/help": "show this",
}


_Sampling = Annotated[
    options.Values,
    FieldOptions(
        SamplingParams, (*options.PARAMS, "adapter"), {"temperature": 0.7, "max_tokens": 1024}
    ),
]
_Engine = Annotated[options.Values, FieldOptions(EngineConfig, options.ONE_ENGINE)]
_OF_A_SERVER = ("api_key", "api_key_file")


@options.from_fields
def chat(
    ctx: typer.Context,
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            show_default=False,
            help="A Hugging Face folder, a hub id, a .gguf file, or smollm2-135m. With --url: the "
            "model's name there; "
            "default: the first that it serves.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="Talk to the model of this server, such as http://127.0.0.1:8000."
        ),
    ] = None,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    sampling: _Sampling,
    generation_config: options.GenerationDefaults = "auto",
    engine: _Engine,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    help_all: HelpAll = False,
) -> None:
    """Talk to a model, here or on a server.

    Ctrl-C stops an answer, Ctrl-D leaves. /help lists the commands. If standard input is not a
    terminal, each of its lines is a message.

    Examples:

    nano-inference chat smollm2-135m
    nano-inference chat --url http://127.0.0.1:8000
    """
    params = options.checked(SamplingParams, **sampling)
    _check_given(ctx, model, url)
    if url is not None:
        client = HttpClient(url, options.key_of(api_key, api_key_file))
        answer = partial(_ask_server, client, model or client.default_model())
        _Session(answer, params, system).run()
        return
    assert model is not None
    config = options.engine_config(options.checked_model(model), engine, max_batch_size=1)
    _require_template(config.model_path, config.tokenizer_path)
    with load_engine(config) as built:
        params = options.with_recommended(ctx, params, built.model_folder, generation_config)
        _Session(partial(_ask_engine, built), params, system).run()


def _check_given(ctx: typer.Context, model: str | None, url: str | None) -> None:
    """Refuse options that could have no effect."""
    if model is None and url is None:
        raise typer.BadParameter("name a MODEL, or a server with --url.")
    unused, owner = (
        (_OF_A_SERVER, "a server (--url)")
        if url is None
        else ((*options.ONE_ENGINE, "generation_config", "adapter"), "an engine of your own")
    )
    if (flag := options.first_given(ctx, unused)) is not None:
        raise typer.BadParameter(f"{flag} is for {owner}; leave it out.")


def _require_template(model: str, tokenizer: str | None) -> None:
    """Raise `InvalidRequest` where there is no chat template, before weights are read."""
    with errors.status(f"reading {model}"):
        from nano_inference.models.loading import resolve_model
        from nano_inference.text.tokenizer import load_tokenizer

        if load_tokenizer(resolve_model(tokenizer or model)).chat_template is None:
            raise InvalidRequest(
                f"{tokenizer or model} has no chat template, so it cannot tell your words from "
                "its own; let it "
                f"continue text with `nano-inference generate {model} -p TEXT`, or name with "
                "--tokenizer a folder that "
                "has one."
            )


def _ask_engine(engine: "InferenceEngine", messages: Messages, params: SamplingParams) -> Pieces:
    from nano_inference.text.chat import encode_chat

    length = len(encode_chat(engine.tokenizer, messages))
    params = _fitting(params, length, engine.max_model_len)
    before = engine.stats().num_steps
    for delta in engine.generate(messages, params, stream=True, progress=False):
        sample = delta.finished
        if sample is None:
            yield Piece(delta.text or "")
        else:
            usage = Usage(
                len(sample.prompt_tokens),
                len(sample.completion_tokens),
                sample.cached_tokens,
                engine.stats().num_steps - before if engine.config.drafts else None,
            )
            yield Piece(delta.text or "", finish_reason=sample.finish_reason, usage=usage)


def _ask_server(
    client: HttpClient, model: str, messages: Messages, params: SamplingParams
) -> Pieces:
    given: dict[str, Any] = {"model": model, "messages": messages}
    counted: dict[str, Any] = {}
    # some servers cannot count; then they refuse what does not fit
    with suppress(InvalidRequest, ServerError):
        counted = client.post("/tokenize", given)
    if isinstance(counted.get("count"), int) and isinstance(counted.get("max_model_len"), int):
        params = _fitting(params, counted["count"], counted["max_model_len"])
    yield from client.chat(given | options.request_body(params))


def _fitting(params: SamplingParams, length: int, limit: int) -> SamplingParams:
    """The parameters, with no more tokens than still fit. Raises `InvalidRequest`."""
    if limit - length < 1:
        raise InvalidRequest(
            f"the conversation has {length} tokens, which leaves no room for an answer: the limit "
            f"is {limit}; /reset forgets it."
        )
    return replace(params, max_tokens=min(params.max_tokens, limit - length))


@dataclass
class _Session:
    """A conversation. `answer` streams the answer to one: at most `params.max_tokens`, and no more
    than still fit.
    """

    answer: Callable[[Messages, SamplingParams], Pieces]
    params: SamplingParams
    system: str | None
    history: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    interactive: bool = field(default_factory=lambda: sys.stdin.isatty())

    def run(self) -> None:
        """Take lines until they end or `/exit`."""
        if self.interactive:
            self._say("Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands.\n")
        read = _line_reader() if self.interactive else sys.stdin.readline
        while (line := self._next_line(read)) is not None:
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    if not self._command(*line.split(maxsplit=1)):
                        return
                else:
                    self._answer(line)
            except (InvalidRequest, ServerError) as problem:
                if not self.interactive:
                    raise
                errors.print(Text(f"error: {problem}", style="red"), soft_wrap=True)

    def _next_line(self, read: Any) -> str | None:
        """The next line; None at the end of input."""
        while True:
            try:
                line: str = read()
            except EOFError:
                errors.print()
                return None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self._say("\nCtrl-D or /exit leaves.")
                continue
            if not self.interactive and not line:
                return None
            return line.rstrip("\r\n")

    def _command(self, name: str, rest: str = "") -> bool:
        """Obey a line that begins with a slash; False: leave."""
        if name == "/exit":
            return False
        if name == "/reset":
            self.history.clear()
            self._say("The conversation is forgotten.\n")
        elif name == "/system":
            self.system = rest.strip() or None
            self._say(
                "The next answer follows it.\n"
                if self.system
                else "There is no system message any more.\n"
            )
        elif name == "/help":
            for usage, meaning in _COMMANDS.items():
                errors.print(f"{usage:<14}{meaning}", markup=False)
        else:
            raise InvalidRequest(
                f"there is no command {name}; /help lists them. To send the line as a message, "
                "begin it with a space."
            )
        return True

    def _say(self, text: str) -> None:
        """A word to a person; a pipe needs none."""
        if self.interactive:
            errors.print(text, style="dim")

    def _answer(self, line: str) -> None:
        """Let the model answer a message. Its words are kept, also where it was stopped."""
        message = {"role": "user", "content": line.strip()}
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages = [*first, *self.history, message]
        said: list[str] = []
        usage: Usage | None = None
        is_cut = False
        start = time.perf_counter()
        with Interruptible(self.answer(messages, self.params)) as pieces:
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
        self._say(f"{_figures(usage, seconds, is_cut=is_cut, stopped=pieces.stopped)}\n")

    def _think(self, text: str) -> None:
        """What the model says to itself, which is no part of the answer."""
        if self.interactive:
            errors.print(Text(printable(text), style="dim"), end="", soft_wrap=True)


def _figures(usage: Usage | None, seconds: float, *, is_cut: bool, stopped: bool) -> str:
    if usage is None:
        return "stopped" if stopped else "the server did not count"
    tokens, cut = usage.completion_tokens, " (cut off)" if is_cut else ""
    a_step = f", {tokens / usage.num_steps:.2f} tokens a step" if usage.num_steps else ""
    return (
        f"{tokens} tokens{cut}, {tokens / max(seconds, 1e-9):,.1f} tok/s{a_step}; "
        f"{usage.cached_tokens} of "
        f"{usage.prompt_tokens} prompt tokens cached"
    )


def _line_reader() -> Any:
    """`input` with the editing of lines that readline gives it."""
    try:
        import readline  # noqa: F401 - importing it is what changes `input`
    except ImportError:
        return lambda: input(">>> ")
    # \x01 and \x02 tell readline that what stands between them has no width.
    prompt = "\x01\x1b[1;36m\x02>>>\x01\x1b[0m\x02 " if has_colors(output) else ">>> "
    return lambda: input(prompt)
