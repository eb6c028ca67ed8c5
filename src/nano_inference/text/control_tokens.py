"""Only the chat template can create control tokens. A token that a caller writes out stays text.

1. Before rendering, `mark` inserts a secret mark into every control token in the caller's strings,
   after its first character. The control tokens of the rendered text are then the template's.
2. `encode_marked` replaces these by secret names and removes the marks.
3. A tokenizer that knows control tokens only by their secret names encodes the text. The caller's
   text is tokenized as if control tokens did not exist.

Steps 2 and 3 are skipped if there are no marks, which is the usual case.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from nano_inference.errors import InvalidRequest
from nano_inference.text.budget import MAX_TEXT
from nano_inference.text.reuse import Memo
from nano_inference.text.tokenizer import LONG, Tokenizer, encode_ids

# templates do not change digits: JSON, case, trimming and splitting at spaces keep them
_DIGITS = 40


def secret_digits() -> str:
    """Return random digits that occur in no text."""
    return str(10 ** (_DIGITS - 1) + secrets.randbelow(9 * 10 ** (_DIGITS - 1)))


_MARK = secret_digits()
_NAMES = secret_digits()
_CUT = 12  # number of digits that identify a part of a mark
_NUMBER = 8  # digits of a control token's number in its secret name


@dataclass(frozen=True)
class _Finder:
    """Finder of control tokens in a text."""

    exact: tokenizers.Tokenizer  # finds all added tokens, as the tokenizer does
    any_case: tokenizers.Tokenizer  # finds control tokens
    # proper prefixes and suffixes of control tokens: lower case, two characters or more
    begins: frozenset[str]
    ends: frozenset[str]
    longest: int
    kept: Memo[frozenset[int]]  # places in texts that the next turn of a conversation repeats

    def places(self, text: str) -> frozenset[int]:
        """Return the positions for marks, so that no concatenation with `text` contains a control
        token.
        """
        return self.kept(text)

    def search(self, text: str) -> frozenset[int]:
        # ignoring case, since a template may change it
        positions = {begin + 1 for begin, _ in _spans(self.any_case, text)}
        for size in range(2, min(self.longest, len(text)) + 1):
            if text[-size:].lower() in self.begins:
                positions.add(len(text) - size + 1)
            if text[:size].lower() in self.ends:
                positions.add(1)
        return frozenset(positions)


def counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """Return a function that counts the control tokens in a text, ignoring case."""
    finder = _finder(tokenizer).any_case
    return lambda text: len(_spans(finder, text))


def _spans(finder: tokenizers.Tokenizer, text: str) -> list[tuple[int, int]]:
    if len(text) <= LONG:
        return finder.encode(text, add_special_tokens=False).offsets
    return finder.encode_batch([text], add_special_tokens=False)[0].offsets


@lru_cache(maxsize=8)
def _finder(tokenizer: Tokenizer) -> _Finder:
    texts = [token.content for token in _control_tokens(tokenizer).values()]
    added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    exact, any_case = tokenizers.Tokenizer(models.BPE()), tokenizers.Tokenizer(models.BPE())
    exact.add_special_tokens([AddedToken(text, normalized=False) for text in added])
    any_case.normalizer = normalizers.Lowercase()
    any_case.add_special_tokens([AddedToken(text, normalized=True) for text in texts])
    lower = [text.lower() for text in texts]
    finder = _Finder(
        exact=exact,
        any_case=any_case,
        begins=frozenset(text[:size] for text in lower for size in range(2, len(text))),
        ends=frozenset(text[-size:] for text in lower for size in range(2, len(text))),
        longest=max(map(len, texts), default=0),
        kept=Memo(lambda text: finder.search(text)),
    )
    return finder


def _control_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    # a mark does not fit into a token of one character, and no model has such a control token
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        token_id: token
        for token_id, token in added.items()
        if token.special and len(token.content) > 1
    }


def mark(tokenizer: Tokenizer, value: Any) -> tuple[Any, bool]:
    """Return a copy of plain data with marks in all strings and keys, and True if it has any."""
    finder = _finder(tokenizer)
    marked = False
    left = MAX_TEXT

    def walk(item: Any) -> Any:
        if isinstance(item, str):
            return walk_text(item)
        if isinstance(item, dict):
            return {walk(key): walk(inner) for key, inner in item.items()}
        return [walk(inner) for inner in item] if isinstance(item, list) else item

    def walk_text(text: str) -> str:
        nonlocal marked, left
        left -= len(text)
        if left < 0:  # the limit of a rendered text
            raise InvalidRequest(
                f"the conversation and its tools have more than {MAX_TEXT:,} characters"
            )
        # tokens may overlap, so search the marked text again
        for _ in range(finder.longest + 1):
            ends = [*sorted(finder.places(text)), len(text)]
            if len(ends) == 1:
                return text
            marked = True
            text = text[: ends[0]] + "".join(
                _MARK + text[begin:end] for begin, end in pairwise(ends)
            )
        raise InvalidRequest(
            "a message repeats control tokens in a way that cannot be encoded; leave them out"
        )

    try:
        return walk(value), marked
    except RecursionError:  # arguments of a call, parsed from text
        raise InvalidRequest("a chat message is nested too deeply to be rendered") from None


def encode_marked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a rendered text with marks.

    Raises:
        InvalidRequest: The template cut a mark in two.
    """
    secret, named = _secret_tokenizer(tokenizer), _named(tokenizer, text)
    ids = secret.encode(_unmarked(named))
    if not secret.control_ids.isdisjoint(ids):
        # the vocabulary also has a control token's text; the marks split it into two pieces
        ids = secret.encode(named)
    return [secret.ids.get(token_id, token_id) for token_id in ids if token_id != secret.mark_id]


def named_text(tokenizer: Tokenizer, text: str) -> str:
    """Return a rendered text with secret names for its control tokens, and without marks.

    Texts that are equal in this form have equal token ids (`encode_named`).

    Raises:
        InvalidRequest: The template cut a mark in two.
    """
    return _unmarked(_named(tokenizer, text))


def named_tokens(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of token ids, with secret names for control tokens."""
    control, secret = _control_tokens(tokenizer), _secret_tokenizer(tokenizer)
    parts: list[str] = []
    before: list[int] = []  # the control token that a run of text follows
    for is_control, tokens in groupby(token_ids, control.__contains__):
        run = list(tokens)
        if is_control:
            parts += [secret.names[control[token_id].content] for token_id in run]
            before = run[-1:] if _decodes_after_control(tokenizer) else []
        else:
            head = tokenizer.decode(before, skip_special_tokens=False)
            text = tokenizer.decode([*before, *run], skip_special_tokens=False)
            parts.append(text.removeprefix(head))
    return "".join(parts)


@lru_cache(maxsize=8)
def _decodes_after_control(tokenizer: Tokenizer) -> bool:
    """Return True if text is decoded together with the control token before it. False: a tokenizer
    puts a space before every text, which decoding removes only at the beginning.
    """
    secret = _secret_tokenizer(tokenizer)
    for token, name in secret.names.items():
        ids = [secret.ids.get(each, each) for each in secret.encode(f"{name}x")]
        return tokenizer.decode(ids, skip_special_tokens=False) == f"{token}x"
    return True


def encode_named(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text in the form of `named_text`.

    Raises:
        InvalidRequest: A message writes out a control token that the vocabulary also has as text.
    """
    secret = _secret_tokenizer(tokenizer)
    ids = secret.encode(text)
    if not secret.control_ids.isdisjoint(ids):
        raise InvalidRequest(
            "a message writes out a control token that this vocabulary also has as text; leave it "
            "out of the message"
        )
    return [secret.ids.get(token_id, token_id) for token_id in ids]


def last_control(text: str) -> int:
    """Return the index of the last control token in a text in the form of `named_text`, or 0."""
    return max(text.rfind(_NAMES), 0)


def first_control(text: str, start: int = 0) -> str | None:
    """Return the name of the first control token after `start` in a text in the form of
    `named_text`, or None.
    """
    index = text.find(_NAMES, start)
    return None if index < 0 else text[index : index + _DIGITS + _NUMBER]


def _named(tokenizer: Tokenizer, text: str) -> str:
    """Return a rendered text with secret names for its control tokens, and with its marks."""
    names = _secret_tokenizer(tokenizer).names
    pieces: list[str] = []
    last = 0
    for begin, end in _spans(_finder(tokenizer).exact, text):
        token = text[begin:end]
        pieces += [text[last:begin], names.get(token, token)]
        last = end
    return "".join([*pieces, text[last:]])


def _unmarked(named: str) -> str:
    unmarked = named.replace(_MARK, "")
    if _MARK[:_CUT] in unmarked or _MARK[-_CUT:] in unmarked:
        raise InvalidRequest(
            "the chat template cuts a message where it writes out a control token; leave that "
            "token out of the message"
        )
    return unmarked


@dataclass(frozen=True)
class _SecretTokenizer:
    backend: tokenizers.Tokenizer
    names: Mapping[str, str]  # control token -> secret name
    ids: Mapping[int, int]  # id here -> id in the tokenizer, if they differ
    control_ids: frozenset[int]  # ids that a control token's text must not get
    mark_id: int

    def encode(self, text: str) -> list[int]:
        return encode_ids(self.backend, text)


@lru_cache(maxsize=8)
def _secret_tokenizer(tokenizer: Tokenizer) -> _SecretTokenizer:
    control = _control_tokens(tokenizer)
    spec = json.loads(tokenizer.backend.to_str())
    added = tokenizer.backend.get_added_tokens_decoder()
    backend = tokenizers.Tokenizer.from_str(
        json.dumps(
            spec | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        )
    )
    names = {
        token.content: f"{_NAMES}{number:0{_NUMBER}}"
        for number, token in enumerate(control.values())
    }
    ids: dict[int, int] = {}
    for token_id, token in added.items():
        name = names.get(token.content, token.content)
        backend.add_tokens(
            [
                AddedToken(
                    name,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized and name == token.content,
                    special=token.special,
                )
            ]
        )
        ids[_id(backend, name)] = token_id
    backend.add_special_tokens([AddedToken(_MARK, normalized=False)])
    # any text may become the unknown token
    unknown = tokenizer.backend.token_to_id(spec["model"].get("unk_token") or "")
    control_ids = frozenset(control) - ids.keys() - {unknown}
    return _SecretTokenizer(backend, names, ids, control_ids, _id(backend, _MARK))


def _id(backend: tokenizers.Tokenizer, token: str) -> int:
    token_id = backend.token_to_id(token)
    assert token_id is not None  # it has just been added
    return token_id
