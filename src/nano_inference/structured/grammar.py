"""`Grammar`: the language that a completion must match."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nano_inference.errors import InvalidRequest

GrammarKind = Literal["json", "regex", "choice", "lark", "gbnf", "structural_tag"]
BackendName = Literal["llguidance", "xgrammar", "outlines"]

# Whitespace between the tokens of JSON: a space, or a new line and its indentation. The bound is
# needed because models loop in unbounded whitespace.
BOUNDED = r"[ ]?(\n[ \t]{0,32})?"
COMPACT = ""
MOST_CHARACTERS = 2**20  # limit for a grammar
MOST_OF_MARKER = 64  # bytes of `after`, and of `opened_by`
# prefix of a sample's problem if its grammar was rejected while compiling
REFUSED = "refused: "


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language. A sample draws only tokens that continue some text of the language, and may end
    only at the end of such a text.

    Attributes:
        kind: Notation of `text`: a JSON schema, a regular expression (syntax of Rust's `regex`), a
            JSON list of strings to choose from, a grammar in Lark's or llama.cpp's notation, or a
            structural tag (JSON).
        text: The language, in that notation.
        whitespace: Regular expression for the whitespace between the tokens of JSON; "" is none.
            Backends other than llguidance accept only "" and the default, and allow a part of the
            default.
        lenient: Ignore keywords of a JSON schema that the backend cannot enforce, so that a sample
            may be invalid. False: reject such schemas and name the keyword.
        after: Text such as "</think>". The grammar begins after its first appearance in the
            completion. Before it, every token but the end is allowed. "": the grammar begins at
            the start of the completion.
        opened_by: Text such as "<think>". Only a completion that begins with it has text before
            the grammar; any other begins with the grammar. "": every completion has such text.
        backend: Backend that makes the masks; None: the engine's default.
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
                f"a {self.kind} grammar must have 1 to {MOST_CHARACTERS} characters; got "
                f"{len(self.text)}."
            )
        for name in ("after", "opened_by"):
            _require_marker(name, getattr(self, name))
        if self.opened_by and not self.after:
            raise InvalidRequest(
                f"opened_by={self.opened_by!r} of a grammar requires `after`, the text after which "
                "the grammar begins."
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
        """Return a grammar for JSON that matches a schema, given as an object or as its text."""
        return cls("json", _json_text(schema), whitespace, lenient)

    @classmethod
    def json_object(cls, *, whitespace: str = BOUNDED) -> "Grammar":
        """Return a grammar for any JSON object."""
        return cls("json", '{"type":"object"}', whitespace)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Return a grammar for texts that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> "Grammar":
        """Return a grammar for one of these strings."""
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """Return a grammar in llguidance's dialect of Lark, whose first rule is `start`."""
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> "Grammar":
        """Return a grammar in llama.cpp's notation, whose first rule is `root`."""
        return cls("gbnf", text)

    @classmethod
    def structural_tag(
        cls, tag: Mapping[str, Any] | str, *, whitespace: str = BOUNDED
    ) -> "Grammar":
        """Return a grammar for free text with tagged parts that match a schema.

        `structured.structural_tag` describes the notations.
        """
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
        raise InvalidRequest(
            f"the text of a {kind} grammar is not valid JSON: {problem}."
        ) from None


def _require_one_of(name: str, value: Any, options: Iterable[Any]) -> None:
    if value not in options:
        raise InvalidRequest(
            f"{name} of a grammar must be one of "
            f"{', '.join(each for each in options if each is not None)}; got {value!r}."
        )


def _require_marker(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name}={text!r} of a grammar cannot be written as UTF-8.") from None
    if size > MOST_OF_MARKER:
        raise InvalidRequest(
            f"{name} of a grammar must have at most {MOST_OF_MARKER} bytes; got {size}."
        )


def _require_shape(kind: str, value: Any) -> None:
    if kind == "json" and not isinstance(value, dict | bool):
        raise InvalidRequest(f"a JSON schema must be an object, not {value!r}.")
    if kind == "structural_tag" and not isinstance(value, dict):
        raise InvalidRequest(f"a structural tag must be an object, not {value!r}.")
    if kind == "choice" and not (
        isinstance(value, list) and value and all(isinstance(each, str) and each for each in value)
    ):
        raise InvalidRequest("choices must be a list of at least one string, none of them empty.")
