"""Protocols of grammar backends and matchers, and the table of backends."""

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

# bytes of stack of the compiling threads; the check that comes first runs with a smaller stack
COMPILER_STACK = 2**24
MOST_KEPT = 4  # vocabularies that a backend keeps in its own form

Read = TypeVar("Read")


class GrammarError(Exception):
    """A matcher cannot continue: a limit was reached, or a token is forbidden by its mask."""


class CompilationStopped(InvalidRequest):
    """A limit ended a compilation. Another attempt may succeed."""


@dataclass(frozen=True)
class Vocabulary:
    """Token vocabulary of a model, as matchers use it.

    Attributes:
        tokenizer_json: Tokenizer, in the format of the `tokenizers` library.
        size: Number of token ids, of the tokenizer or of the model, whichever is larger.
        drawable: Number of the model's token ids. Masks end there.
        eos_token_ids: Ids that end a text. At least one.
        bytes_of: Returns the bytes of a token in the middle of a text, a piece of UTF-8. Special
            tokens return their names.
    """

    tokenizer_json: str
    size: int
    drawable: int
    eos_token_ids: tuple[int, ...]
    bytes_of: Callable[[int], bytes] = field(compare=False)

    @cached_property
    def key(self) -> str:
        """Hash of the vocabulary, for use as a key."""
        text = f"{self.size} {self.eos_token_ids} {self.tokenizer_json}"
        return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Matcher(Protocol):
    """Position of one sample in its grammar. Used by one thread at a time.

    Attributes:
        backend: Backend that made the matcher.
    """

    backend: "Backend"

    @property
    def is_spent(self) -> bool:
        """True if a limit that this matcher shares with its copies was reached."""
        return False

    def fill(self, words: np.ndarray) -> None:
        """Write the mask of the next token to `words`, int32 [W]: bit i % 32 of word i // 32 is
        token i. If the text may end, end-of-sequence ids are allowed. Raises `GrammarError`.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance by a token other than an end-of-sequence id. Raises `GrammarError`."""
        ...

    def forced(self) -> Sequence[int]:
        """Return the tokens that the text must continue with, split as the tokenizer would, or
        nothing. Another split of the same text may be allowed too.
        """
        return ()

    def copy(self) -> "Matcher":
        """Return a second matcher at the same position."""
        ...


class Backend(Protocol):
    """Compiler of grammars."""

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequest` if a grammar cannot be compiled, as far as that can be checked
        without a vocabulary.
        """
        ...

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Prepare a vocabulary before its first grammar arrives. Raises `InvalidRequest`."""
        ...

    def compile(self, grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
        """Return a matcher at the beginning of a text. Releases the interpreter's lock.

        Raises `InvalidRequest`.
        """
        ...

    def fill(self, matchers: Sequence[Matcher], table: np.ndarray) -> Sequence[GrammarError | None]:
        """Write the masks of several of this backend's matchers to `table`, int32 [R, W] of zeros,
        one row per matcher as in `Matcher.fill`. Return the error of each matcher, or None.
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
    """Return `read` with a cache of its results for the last few vocabularies. The function is
    thread-safe and runs `read` once at a time.
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


# by name: the class, the module that it needs, and the package to install with pip
_CLASSES: Mapping[str, tuple[str, str, str]] = {
    "llguidance": ("LlguidanceBackend", "llguidance", "llguidance"),
    "xgrammar": ("XgrammarBackend", "xgrammar", "nano-inference[xgrammar]"),
    "outlines": ("OutlinesBackend", "outlines_core", "nano-inference[outlines]"),
}
_loaded: dict[str, Backend] = {}


def backend_named(name: BackendName) -> Backend:
    """Return the backend of a name. Raises `InvalidRequest` if its package is missing."""
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
