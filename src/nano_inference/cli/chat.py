"""`nano-inference chat`: a conversation in the terminal, with an engine of its own or with a
server.
"""

import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.text import Text

from nano_inference.cli import options
from nano_inference.cli.backends import ChatBackend, EngineBackend, ServerBackend
from nano_inference.cli.coloring import has_colors
from nano_inference.cli.terminal import Interruptible, errors, load_engine, output, printable, write
from nano_inference.config import EngineConfig
from nano_inference.errors import InvalidRequest
from nano_inference.serving.http_client import HttpClient, ServerError, Usage
from nano_inference.types import SamplingParams

_COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system message; without TEXT: remove it",
    "/exit": "leave, as Ctrl-D does",
    "/help": "show this",
}


_OF_THE_ENGINE = (
    *("tokenizer", "cache_type", "dtype", "device", "kv_cache_memory", "max_model_len", "threads"),
    "generation_config",
)
_OF_A_SERVER = ("api_key", "api_key_file")


def chat(
    ctx: typer.Context,
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
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    max_tokens: options.MaxTokens = 1024,
    seed: options.Seed = None,
    stop: options.Stop = None,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    generation_config: options.GenerationDefaults = "auto",
    tokenizer: options.Tokenizer = None,
    cache_type: options.Cache = "paged",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    kv_cache_memory: options.KVCacheMemory = None,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Talk to a model, here or on a server.

    Ctrl-C stops an answer, Ctrl-D leaves. /help lists the commands. If standard input is not a
    terminal, each of its lines is a message.
    """
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        seed=seed,
        stop=tuple(stop or ()),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
    )
    _check_given(ctx, model, url)
    if url is not None:
        client = HttpClient(url, options.key_of(api_key, api_key_file))
        _Session(ServerBackend(client, model or client.default_model()), params, system).run()
        return
    assert model is not None
    config = EngineConfig(
        model,
        tokenizer_path=tokenizer,
        cache_type=cache_type,
        dtype=dtype,
        device=device,
        kv_cache_memory=kv_cache_memory,
        max_model_len=max_model_len,
        num_threads=threads,
        max_batch_size=1,
    )
    _require_template(model, tokenizer)
    with load_engine(config) as engine:
        params = options.with_recommended(ctx, params, engine.model_folder, generation_config)
        _Session(EngineBackend(engine), params, system).run()


def _check_given(ctx: typer.Context, model: str | None, url: str | None) -> None:
    """Refuse options that could have no effect."""
    if model is None and url is None:
        raise typer.BadParameter("name a MODEL, or a server with --url.")
    unused, owner = (
        (_OF_A_SERVER, "a server (--url)")
        if url is None
        else (_OF_THE_ENGINE, "an engine of your own")
    )
    for name in unused:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"--{name.replace('_', '-')} is for {owner}; leave it out.")


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


@dataclass
class _Session:
    """A conversation and who answers it."""

    backend: ChatBackend
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
        """Let the model answer a message. What it said is kept, also where it was stopped."""
        message = {"role": "user", "content": line.strip()}
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages = [*first, *self.history, message]
        said: list[str] = []
        usage: Usage | None = None
        is_cut = False
        start = time.perf_counter()
        with Interruptible(self.backend.answer(messages, self.params)) as pieces:
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
    return (
        f"{tokens} tokens{cut}, {tokens / max(seconds, 1e-9):,.1f} tok/s; {usage.cached_tokens} of "
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
