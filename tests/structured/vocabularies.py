"""A vocabulary of a token a byte, for tests of grammars."""

from pathlib import Path

import numpy as np

from nano_inference.structured.backend import Matcher, Vocabulary, backend_named
from nano_inference.structured.grammar import BackendName, Grammar
from nano_inference.structured.masks import num_words
from nano_inference.text.detokenizer import Detokenizer
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from tests.cli.running import write_tokenizer

EOS = 2


def byte_tokenizer(folder: Path) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, None)
    return load_tokenizer(folder)


def with_tokenizer(folder: Path) -> Path:
    """The same folder of a model, which can have grammars now."""
    write_tokenizer(folder, None)
    return folder


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(
        tokenizer.backend.to_str(),
        tokenizer.vocab_size,
        tokenizer.vocab_size,
        (EOS,),
        lambda: Detokenizer(tokenizer, skip_special_tokens=False),
    )


def allowed(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def mask(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    words = np.zeros(num_words(vocabulary.size), dtype=np.int32)
    matcher.fill(words)
    return allowed(words)


def accepts(
    grammar: Grammar, text: str, tokenizer: Tokenizer, backend: BackendName = "llguidance"
) -> bool:
    """Whether masks let this text be drawn token by token, and end."""
    vocabulary = vocabulary_of(tokenizer)
    matcher = backend_named(backend).compile(grammar, vocabulary)
    for token_id in tokenizer.encode(text):
        if token_id not in mask(matcher, vocabulary):
            return False
        matcher.accept(token_id)
    return EOS in mask(matcher, vocabulary)
