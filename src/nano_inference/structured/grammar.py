"""`Grammar`: the language that a completion must belong to."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nano_inference.errors import InvalidRequest

GrammarKind = Literal["json", "regex", "choice", "lark", "gbnf", "structural_tag"]
BackendName = Literal["llguidance", "xgrammar", "outlines"]

# What may stand between the tokens of JSON: a space, or a new line and its indentation. Without a
# bound models loop in it.
BOUNDED = r"[ ]?(\n[ \t]{0,32})?"
COMPACT = ""
MOST_CHARACTERS = 2**20  # of a grammar
MOST_OF_MARKER = 64  # bytes of `after`, and of `opened_by`
# What begins the problem of a sample whose grammar turns out to be one that cannot be enforced.
REFUSED = "refused: "


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language. A sample under it draws only tokens that some text of the language goes on with,
    and may end only where such a text ends.

    Attributes:
        kind: of `text`: a JSON schema, a regular expression (syntax of Rust's `regex`), a JSON list
            of strings to choose from, a grammar in Lark's or llama.cpp's notation, or a structural
            tag (JSON).
        text: the language in that notation.
        whitespace: regular expression of what may stand between the tokens of JSON; "" is nothing.
            Backends other than llguidance take the default, of which they allow a part, and "".
        lenient: pass over keywords of a JSON schema that the backend cannot enforce. Then a
            sample may be invalid. False: they are refused by name.
        after: the grammar begins behind the first appearance of this text in the completion, such
            as "</think>"; before it everything but the end is allowed. "": at the beginning.
        opened_by: only a completion that begins with this text, such as "<think>", has anything
            before its grammar, which else begins at once. "": every completion has.
        backend: that makes the masks; None: the engine's.
    """

    kind: GrammarKind
    text: str
    whitespace: str = BOUNDED
    lenient: bool = False
    after: str = ""
    opened_by: str = ""
    backend: BackendName | None = None

    def __post_init__(self) -> None:
        _require_one_of("kind", self.kind, get_args(GrammarKind))
        _require_one_of("backend", self.backend, (None, *get_args(BackendName)))
        for name in ("text", "whitespace", "after", "opened_by"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequest(
                    f"{name} of a grammar must be a string, not {getattr(self, name)!r}."
                )
        if not isinstance(self.lenient, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequest(
                f"lenient of a grammar must be True or False, not {self.lenient!r}."
            )
        if not 0 < len(self.text) <= MOST_CHARACTERS:
            raise InvalidRequest(
                f"the text of a {self.kind} grammar has {len(self.text)} characters; 1 to "
                f"{MOST_CHARACTERS} are possible."
            )
        for name in ("after", "opened_by"):
            _require_marker(name, getattr(self, name))
        if self.opened_by and not self.after:
            raise InvalidRequest(
                f"opened_by={self.opened_by!r} of a grammar needs `after`, the text behind which "
                "it begins."
            )
        if self.kind in ("json", "choice", "structural_tag"):
            _require_shape(self.kind, _read_json(self.kind, self.text))

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, Any] | bool | str,
        *,
        whitespace: str = BOUNDED,
        lenient: bool = False,
    ) -> "Grammar":
        """JSON that a schema describes; the schema as an object or as its text."""
        return cls("json", _json_text(schema), whitespace, lenient)

    @classmethod
    def json_object(cls, *, whitespace: str = BOUNDED) -> "Grammar":
        """Any JSON object."""
        return cls("json", '{"type":"object"}', whitespace)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> "Grammar":
        """One of these strings."""
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """A grammar in llguidance's dialect of Lark, whose first rule is `start`."""
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> "Grammar":
        """A grammar in llama.cpp's notation, whose first rule is `root`."""
        return cls("gbnf", text)

    @classmethod
    def structural_tag(
        cls, tag: Mapping[str, Any] | str, *, whitespace: str = BOUNDED
    ) -> "Grammar":
        """Free text with tagged parts that follow a schema; see `structured.structural_tag`."""
        return cls("structural_tag", _json_text(tag), whitespace)


def _json_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as problem:
        raise InvalidRequest(f"the grammar cannot be written as JSON: {problem}.") from None


def _read_json(kind: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise InvalidRequest(f"the text of a {kind} grammar is no JSON: {problem}.") from None


def _require_one_of(name: str, value: Any, options: Iterable[Any]) -> None:
    if value not in options:
        raise InvalidRequest(
            f"{name} {value!r} of a grammar is not one of "
            f"{', '.join(each for each in options if each is not None)}."
        )


def _require_marker(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name}={text!r} of a grammar cannot be written as UTF-8.") from None
    if size > MOST_OF_MARKER:
        raise InvalidRequest(
            f"{name} of a grammar has {size} bytes; {MOST_OF_MARKER} are possible."
        )


def _require_shape(kind: str, value: Any) -> None:
    if kind == "json" and not isinstance(value, dict | bool):
        raise InvalidRequest(f"a JSON schema must be an object, not {value!r}.")
    if kind == "structural_tag" and not isinstance(value, dict):
        raise InvalidRequest(f"a structural tag must be an object, not {value!r}.")
    if kind == "choice" and not (
        isinstance(value, list) and value and all(isinstance(each, str) and each for each in value)
    ):
        raise InvalidRequest(
            "choices must be a list of one or more strings, each of at least one character."
        )
