"""A vocabulary with one token per byte, and the backends, for grammar tests."""

from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from nano_inference.structured.backend import Matcher, Vocabulary, backend_named
from nano_inference.structured.grammar import BackendName, Grammar
from nano_inference.structured.mask_bits import may_draw, num_words
from nano_inference.structured.matching import GrammarState
from nano_inference.structured.thought import Thoughts
from nano_inference.text.token_texts import TokenTexts
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from tests.cli.running import write_tokenizer

EOS = 2
PACKAGES: dict[BackendName, str] = {
    "llguidance": "llguidance",
    "xgrammar": "xgrammar",
    "outlines": "outlines_core",
}
# every backend: tests skip those whose package is missing
BACKENDS = [
    pytest.param(
        name, marks=pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is missing")
    )
    for name, package in PACKAGES.items()
]


def byte_tokenizer(folder: Path) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, None)
    return load_tokenizer(folder)


def with_tokenizer(folder: Path) -> Path:
    """Add a tokenizer to a model's folder, so that it supports grammars and budgets of thought."""
    write_tokenizer(folder, "{{ messages }}<think>")
    return folder


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(
        tokenizer.backend.to_str(),
        tokenizer.vocab_size,
        tokenizer.vocab_size,
        (EOS,),
        TokenTexts(tokenizer).bytes_of,
    )


def allowed(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def mask(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    words = np.zeros(num_words(vocabulary.size), dtype=np.int32)
    matcher.fill(words)
    return allowed(words)


@lru_cache(256)
def _compiled(grammar: Grammar, vocabulary: Vocabulary, backend: BackendName) -> Matcher:
    return backend_named(backend).compile(grammar, vocabulary)


def compiled(
    grammar: Grammar, tokenizer: Tokenizer, backend: BackendName = "llguidance"
) -> Matcher:
    """Return a new matcher in its initial state."""
    vocabulary = vocabulary_of(tokenizer)
    if backend == "llguidance":  # copies share its limits
        return backend_named(backend).compile(grammar, vocabulary)
    return _compiled(grammar, vocabulary, backend).copy()


def state_of(
    grammar: Grammar, tokenizer: Tokenizer, backend: BackendName = "llguidance"
) -> GrammarState:
    """Return the state at the beginning of a sample's text."""
    vocabulary = vocabulary_of(tokenizer)
    matcher = compiled(grammar, tokenizer, backend)
    first = np.zeros(num_words(vocabulary.size), dtype=np.int32)
    matcher.fill(first)
    state = GrammarState(grammar)
    state.begin(matcher, vocabulary, first, Thoughts(vocabulary).of(grammar))
    return state


def accepts_ids(state: GrammarState, token_ids: Iterable[int]) -> bool:
    """Return True if the masks allow these tokens and then the end."""
    for token_id in token_ids:
        if not may_draw(state.words, token_id):
            return False
        state.accept(token_id)
        state.fill()
    return may_draw(state.words, EOS)


def accepts(
    grammar: Grammar, text: str, tokenizer: Tokenizer, backend: BackendName = "llguidance"
) -> bool:
    """Return True if the masks allow this text token by token, and then the end."""
    return accepts_ids(state_of(grammar, tokenizer, backend), tokenizer.encode(text))
