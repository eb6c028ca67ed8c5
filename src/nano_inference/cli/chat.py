"""`nano-inference chat`: a conversation in the terminal."""

import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from nano_inference.cli import options
from nano_inference.cli.coloring import has_colors
from nano_inference.cli.terminal import Interruptible, errors, load_engine, output, write
from nano_inference.errors import InvalidRequest
from nano_inference.types import SamplingParams, TrainingSample

if TYPE_CHECKING:
    from nano_inference.engine.engine import InferenceEngine

_COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system message; without TEXT: remove it",
    "/exit": "leave, as Ctrl-D does",
    "/help": "show this",
}


def chat(
    model: options.Model,
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
    """Talk to a model.

    Ctrl-C stops an answer, Ctrl-D leaves. /help lists the commands. If standard input is not a terminal, each of its
    lines is a message.
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
    config = options.engine_config(
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
        _Session(engine, params, system).run()


def _require_template(model: str, tokenizer: str | None) -> None:
    """Raise `InvalidRequest` where there is no chat template, before weights are read."""
    with errors.status(f"reading {model}"):
        from nano_inference.models.loading import resolve_model
        from nano_inference.text.tokenizer import load_tokenizer

        if load_tokenizer(resolve_model(tokenizer or model)).chat_template is None:
            raise InvalidRequest(
                f"{tokenizer or model} has no chat template, so it cannot tell your words from its own; let it "
                f"continue text with `nano-inference generate {model} -p TEXT`, or name with --tokenizer a folder that "
                "has one."
            )


@dataclass
class _Session:
    """A conversation and where it is held."""

    engine: "InferenceEngine"
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
            except InvalidRequest as problem:
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
            self._say("The next answer follows it.\n" if self.system else "There is no system message any more.\n")
        elif name == "/help":
            for usage, meaning in _COMMANDS.items():
                errors.print(f"{usage:<14}{meaning}", markup=False)
        else:
            raise InvalidRequest(
                f"there is no command {name}; /help lists them. To send the line as a message, begin it with a space."
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
        finished: TrainingSample | None = None
        start = time.perf_counter()
        with Interruptible(
            self.engine.generate(messages, self._params_for(messages), stream=True, progress=False)
        ) as deltas:
            for delta in deltas:
                if delta.text:
                    write(delta.text)
                    said.append(delta.text)
                finished = delta.finished or finished
        write("\n")
        if said:
            self.history += [message, {"role": "assistant", "content": "".join(said)}]
        self._say(f"{_figures(finished, time.perf_counter() - start)}\n")

    def _params_for(self, messages: list[dict[str, str]]) -> SamplingParams:
        """The parameters, with no more tokens than still fit."""
        from nano_inference.text.chat import encode_chat

        length = len(encode_chat(self.engine.tokenizer, messages))
        room = self.engine.max_model_len - length
        if room < 1:
            raise InvalidRequest(
                f"the conversation has {length} tokens, which leaves no room for an answer: the limit is "
                f"{self.engine.max_model_len}; /reset forgets it."
            )
        return replace(self.params, max_tokens=min(self.params.max_tokens, room))


def _figures(sample: TrainingSample | None, seconds: float) -> str:
    if sample is None:
        return "stopped"
    tokens = len(sample.completion_tokens)
    cut = " (cut off)" if sample.finish_reason == "length" else ""
    return (
        f"{tokens} tokens{cut}, {tokens / max(seconds, 1e-9):,.1f} tok/s; {sample.cached_tokens} of "
        f"{len(sample.prompt_tokens)} prompt tokens cached"
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
