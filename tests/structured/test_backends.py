"""Grammar backends through their protocol."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from nano_inference import Grammar
from nano_inference.structured.backend import Matcher, backend_named
from nano_inference.structured.grammar import COMPACT
from nano_inference.structured.llguidance_backend import FEW, LlguidanceMatcher
from nano_inference.structured.mask_bits import may_draw, num_words
from nano_inference.structured.matching import GrammarState
from nano_inference.structured.thought import Thoughts
from nano_inference.text.tokenizer import Tokenizer
from tests.structured.vocabularies import (
    EOS,
    accepts_ids,
    allowed,
    byte_tokenizer,
    state_of,
    vocabulary_of,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


GRAMMARS = (
    Grammar.json_object(),
    Grammar.regex("[ab]{40}|c+"),
    Grammar("regex", "[0-9]{9}", after="x"),
    Grammar("regex", "[a-z]{9}", after="x", opened_by="a"),
)


def states_of(tokenizer: Tokenizer, number: int) -> list[GrammarState]:
    vocabulary = vocabulary_of(tokenizer)
    thoughts, states = Thoughts(vocabulary), list[GrammarState]()
    for index in range(number):
        states.append(GrammarState(GRAMMARS[index % len(GRAMMARS)]))
        first = np.zeros(num_words(vocabulary.size), dtype=np.int32)
        matcher = backend_named("llguidance").compile(states[-1].grammar, vocabulary)
        matcher.fill(first)
        states[-1].begin(matcher, vocabulary, first, thoughts.of(states[-1].grammar))
    return states


@pytest.mark.parametrize("number", [2, FEW + 10])
def test_batched_masks_match_single_masks(tokenizer: Tokenizer, number: int) -> None:
    rng = random.Random(number)
    together, alone = states_of(tokenizer, number), states_of(tokenizer, number)
    for _ in range(20):
        for one, other in zip(together, alone, strict=True):
            if not one.is_ended:
                token_id = rng.choice(sorted(allowed(one.words)))
                one.accept(token_id)
                other.accept(token_id)
        before = [state.words for state in together]
        copies = [words.copy() for words in before]
        together[0].fill(together[1:])
        for state in alone:
            state.fill()
        assert [state.problem for state in together] == [state.problem for state in alone]
        for one, other in zip(together, alone, strict=True):
            assert np.array_equal(one.words, other.words)
        # a draw may still read the masks of the preceding step
        assert all(map(np.array_equal, before, copies))


def test_matcher_at_a_limit_does_not_affect_others(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer)
    backend = backend_named("llguidance")
    matchers: list[Any] = [backend.compile(GRAMMARS[1], vocabulary) for _ in range(FEW + 2)]
    broken: LlguidanceMatcher = matchers[3]
    broken.inner.consume_token(EOS + 1)  # in an error state the mask would allow only the end
    table = np.zeros((len(matchers), num_words(vocabulary.size)), dtype=np.int32)
    problems = backend.fill(matchers, table)
    assert [place for place, problem in enumerate(problems) if problem is not None] == [3]
    assert allowed(table[2]) == allowed(table[4]) == set(tokenizer.encode("abc"))
    states = states_of(tokenizer, FEW + 2)
    states[4]._matcher = broken  # pyright: ignore
    states[0].fill(states[1:])
    assert [place for place, state in enumerate(states) if state.problem is not None] == [4]


def test_copy_has_its_backend(tokenizer: Tokenizer) -> None:
    backend = backend_named("llguidance")
    matcher: Matcher = backend.compile(GRAMMARS[0], vocabulary_of(tokenizer))
    assert matcher.copy().backend is backend


ADDED = ["<table>", "<td>", "<think>", "[TABLE]", "<a b>"]


@pytest.fixture(scope="module")
def with_added(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer with added tokens, one of them special."""
    backend = byte_tokenizer(tmp_path_factory.mktemp("added")).backend
    for text in ADDED:
        backend.add_tokens([AddedToken(text, special=text == "<think>")])
    return Tokenizer(backend, backend.get_vocab_size(), EOS, {}, None)


@pytest.mark.parametrize("text", ["<table>", "a <table> of <td>", "[TABLE]"])
def test_text_that_equals_an_added_token_can_be_drawn(text: str, with_added: Tokenizer) -> None:
    """Force the text: one split is forced, and all its tokens can be drawn."""
    state, ids = state_of(Grammar.choice([text]), with_added), list[int]()
    while not state.is_ended:
        assert state.problem is None
        token_id = max(allowed(state.words))
        state.accept(token_id)
        state.fill()
        ids.append(token_id)
    assert with_added.decode(ids) == text


def test_added_token_is_text_like_others_unless_it_is_special(with_added: Tokenizer) -> None:
    words = state_of(Grammar.regex(r"[\[<][^!]*!"), with_added).words
    ids = {text: with_added.backend.token_to_id(text) for text in ADDED}
    drawable = [text for text in ADDED if may_draw(words, ids[text])]
    assert drawable == ["<table>", "<td>", "[TABLE]", "<a b>"]
    for text in ("<table>", "<think>"):  # a grammar can require any token by its id
        state = state_of(Grammar.lark(f'start: <[{ids[text]}]> "x"'), with_added)
        assert accepts_ids(state, [ids[text], *with_added.encode("x")])


SPECIAL = [
    "<|im_end|>",
    "<|im_start|>",
    "</s>",
    "<s>",
    "<pad>",
    "[INST]",
    "<\uff5cUser\uff5c>",
    "<mask>",
]


@pytest.fixture(scope="module")
def with_special(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer with special tokens, one of which absorbs preceding spaces."""
    backend = byte_tokenizer(tmp_path_factory.mktemp("special")).backend
    backend.add_special_tokens([AddedToken(text, lstrip=text == "<mask>") for text in SPECIAL])
    return Tokenizer(backend, backend.get_vocab_size(), EOS, {}, None)


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize(
    "made_of",
    [
        lambda text: Grammar.choice([text]),
        lambda text: Grammar.regex(re.escape(text)),
        lambda text: Grammar.json_schema({"const": text}),
        lambda text: Grammar.json_schema(
            {
                "type": "object",
                "properties": {text: {"enum": [text]}},
                "required": [text],
                "additionalProperties": False,
            },
            whitespace=COMPACT,
        ),
        lambda text: Grammar.lark(f"start: {json.dumps(text, ensure_ascii=False)}"),
        lambda text: Grammar.gbnf(f"root ::= {json.dumps(text, ensure_ascii=False)}"),
    ],
    ids=["choice", "regex", "const", "object", "lark", "gbnf"],
)
@pytest.mark.parametrize("draw", [min, max])
def test_matcher_spells_special_tokens_in_text(
    name: str, made_of: Callable[[str], Grammar], draw: Any, with_special: Tokenizer
) -> None:
    """Draw tokens: each is in the mask, and none is special."""
    text = f"a  {name} b"
    state, ids = state_of(made_of(text), with_special), list[int]()
    special = {with_special.backend.token_to_id(each) for each in SPECIAL}
    while not state.is_ended:
        assert state.problem is None
        assert len(ids) < 200
        forced = state.forced()
        token_id = forced[0] if forced else draw(allowed(state.words) - {EOS} or [EOS])
        state.accept(token_id)
        state.fill()
        ids.append(token_id)
    assert not special & set(ids[:-1])
    assert text in with_special.decode(ids)
