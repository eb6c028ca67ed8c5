"""What makes masks from grammars: the protocol of backends, and which there are."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import numpy as np

from nano_inference.errors import InvalidRequest
from nano_inference.structured.grammar import BackendName, Grammar

# bytes of the stack of threads that compile; what checks a grammar first has less
COMPILER_STACK = 2**24
MOST_KEPT = 4  # vocabularies that a backend has read

Read = TypeVar("Read")


class GrammarError(Exception):
    """A matcher cannot go on: a limit was reached, or a token that its mask forbids was given."""


class CompilationStopped(InvalidRequest):
    """A compilation was ended by its limits. Another attempt may come to an end."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a matcher knows.

    Attributes:
        tokenizer_json: of the `tokenizers` library.
        size: token ids, of the tokenizer or of the model, whichever has more.
        drawable: token ids of the model: masks end there.
        eos_token_ids: that end a text; at least one.
        bytes_of: what a token says in the middle of a text: a piece of UTF-8. Special tokens say
            their names.
    """

    tokenizer_json: str
    size: int
    drawable: int
    eos_token_ids: tuple[int, ...]
    bytes_of: Callable[[int], bytes] = field(compare=False)

    @cached_property
    def key(self) -> str:
        """Names it."""
        told = f"{self.size} {self.eos_token_ids} {self.tokenizer_json}"
        return sha256(told.encode("utf-8", "surrogatepass")).hexdigest()


class Matcher(Protocol):
    """The place in a grammar that one sample has come to. One thread at a time uses it.

    Attributes:
        backend: that made it.
    """

    backend: "Backend"

    @property
    def is_spent(self) -> bool:
        """Whether it shares limits with its copies that one of these has reached."""
        return False

    def fill(self, words: np.ndarray) -> None:
        """Write which tokens may follow, int32 [W]: bit i % 32 of word i // 32 is token i. Where a
        text may end its end-of-sequence ids may follow. Raises `GrammarError`.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Go on with a token that is no end-of-sequence id. Raises `GrammarError`."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that the text must go on with, as the tokenizer would split them; maybe none.
        Another split of the same text may be allowed too.
        """
        return ()

    def copy(self) -> "Matcher":
        """Another one at the same place."""
        ...


class Backend(Protocol):
    """Compiles grammars."""

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequest` for a grammar that cannot be compiled, as far as that shows
        without a vocabulary.
        """
        ...

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Do beforehand what every grammar of a vocabulary needs. Raises `InvalidRequest`."""
        ...

    def compile(self, grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
        """A matcher at the beginning of a text. Releases the interpreter's lock.

        Raises `InvalidRequest`.
        """
        ...

    def fill(self, matchers: Sequence[Matcher], table: np.ndarray) -> Sequence[GrammarError | None]:
        """Write the masks of several of its matchers: int32 [R, W] of zeros, a row each as
        `Matcher.fill` writes it. Returns the error of each matcher, or None.
        """
        problems: list[GrammarError | None] = []
        for matcher, words in zip(matchers, table, strict=True):
            try:
                matcher.fill(words)
                problems.append(None)
            except GrammarError as problem:
                problems.append(problem)
        return problems


def kept(read: Callable[[Vocabulary], Read]) -> Callable[[Vocabulary], Read]:
    """`read`, whose results for the last few vocabularies are kept. Any thread may call it; one
    reads at a time.
    """
    known: OrderedDict[str, Read] = OrderedDict()
    reading = threading.Lock()

    def of(vocabulary: Vocabulary) -> Read:
        with reading:
            if vocabulary.key not in known:
                known[vocabulary.key] = read(vocabulary)
                if len(known) > MOST_KEPT:
                    known.popitem(last=False)
            return known[vocabulary.key]

    return of


# by name: the class, the module that it needs, and what pip installs
_CLASSES: Mapping[str, tuple[str, str, str]] = {
    "llguidance": ("LlguidanceBackend", "llguidance", "llguidance"),
    "xgrammar": ("XgrammarBackend", "xgrammar", "nano-inference[xgrammar]"),
    "outlines": ("OutlinesBackend", "outlines_core", "nano-inference[outlines]"),
}
_loaded: dict[str, Backend] = {}


def backend_named(name: BackendName) -> Backend:
    """The backend of a name. Raises `InvalidRequest` where its package is missing."""
    if name not in _loaded:
        kind, needed, package = _CLASSES[name]
        try:
            if find_spec(needed) is None:  # not imported here: xgrammar would import torch
                raise ImportError(f"No module named {needed!r}")
            loaded: Any = import_module(f"nano_inference.structured.{name}_backend")
            _loaded[name] = getattr(loaded, kind)()
        except ImportError as problem:
            raise InvalidRequest(
                f"the grammar backend {name} needs the package {package}: {problem}; install it, "
                "or choose another backend."
            ) from None
    return _loaded[name]
