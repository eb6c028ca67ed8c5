"""Masks of known tokens: those of one text are computed together and kept up to a size."""

import numpy as np
import pytest

from nano_inference import Grammar
from nano_inference.structured.compiler import GrammarCompiler
from nano_inference.structured.llguidance_backend import LlguidanceBackend
from nano_inference.structured.token_masks import NotInGrammar, Text, TokenMasks
from nano_inference.text.tokenizer import Tokenizer
from tests.structured.vocabularies import EOS, byte_tokenizer, state_of, vocabulary_of

GRAMMARS = [
    Grammar.json_object(),
    Grammar.regex("[0-9]{2,40}"),
    Grammar("regex", "a*", after="x"),
]
TEXTS = ['{"a": [1, 2]}', "12345", "what you like, x aaa".replace("x ", "x"), "{}", "99", "x"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: vocabulary_of(tokenizer))


def texts_of(tokenizer: Tokenizer) -> list[Text]:
    ended = [(*tokenizer.encode(text), EOS) for text in TEXTS]
    pairs = [(GRAMMARS[place % 3], tokens) for place, tokens in enumerate(ended)]
    return [*pairs, *pairs[:2], (GRAMMARS[0], ())]


def one_by_one(text: Text, tokenizer: Tokenizer) -> list[np.ndarray]:
    grammar, tokens = text
    state, masks = state_of(grammar, tokenizer), list[np.ndarray]()
    for token_id in tokens:
        masks.append(state.words.copy())
        state.accept(token_id)
        state.fill()
    return masks


def test_masks_of_a_batch_match_single_texts(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    texts, made = texts_of(tokenizer), TokenMasks(compiler)
    for _ in range(2):  # the second time uses kept masks
        for text, masks in zip(texts, made.of(texts), strict=True):
            expected = one_by_one(text, tokenizer)
            assert len(masks) == len(expected)
            assert all(map(np.array_equal, masks, expected))


def test_masks_are_cached(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, made = texts_of(tokenizer), TokenMasks(compiler)
    first = made.of(texts[:4])
    monkeypatch.setattr(LlguidanceBackend, "fill", None)
    again = made.of([*texts[:4], texts[0]])
    assert all(one is other for one, other in zip(first[0], again[4], strict=True))
    with pytest.raises(TypeError):
        made.of(texts)


def test_equal_masks_share_an_array_and_the_cache_is_bounded(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    made = TokenMasks(compiler)
    (text,) = made.of([(GRAMMARS[0], tuple(tokenizer.encode('{"aaaaaaaaaaaaaaaaaaaaaaa')))])
    assert len({id(words) for words in text}) < 5
    assert all(words.base is None for words in text), "a row would keep those of its step"
    assert made.num_bytes == sum({id(words): words.nbytes for words in text}.values())
    size = made.num_bytes
    small = TokenMasks(compiler, most_bytes=size)
    for n in range(6):
        text = tuple(tokenizer.encode('{"' + "b" * (20 + n)))
        small.of([(GRAMMARS[0], text)])
        assert 0 < small.num_bytes <= size
    TokenMasks(compiler, most_bytes=1).of([(GRAMMARS[0], text)])


def test_unreachable_text_of_a_grammar_is_named(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    digits = tuple(tokenizer.encode("12a"))
    for texts, (text, place), why in [
        ([(GRAMMARS[1], digits[:2]), (GRAMMARS[1], digits)], (1, 2), "is not in its grammar"),
        ([(GRAMMARS[1], (*digits[:2], EOS, EOS))], (0, 3), "after the end of its grammar"),
    ]:
        with pytest.raises(NotInGrammar, match=why) as raised:
            TokenMasks(compiler).of(texts)
        assert (raised.value.text, raised.value.place) == (text, place)
