"""Grammars of custom tools, as regular expressions for the string that a call holds."""

import json
import re
from collections.abc import Callable, Mapping

from nano_inference.errors import InvalidRequest

MOST_CHARACTERS = 1 << 16  # limit of an expression, which repeats a rule wherever it is named

# terminals of Lark's library
_COMMON: Mapping[str, str] = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LETTER": "[a-zA-Z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|//[^\n]*|\#[^\n]*)
    |(?P<line>\n\s*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<name>[?!]?[_a-zA-Z][_a-zA-Z0-9]*)
    |(?P<count>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)
    |(?P<alias>->[ \t]*[_a-zA-Z][_a-zA-Z0-9]*)
    |(?P<priority>\.-?\d+)
    |(?P<directive>%[a-z]+[^\n]*)
    |(?P<range>\.\.)
    |(?P<mark>[:|()\[\]?*+])""",
    re.VERBOSE,
)
_Token = tuple[str, str]


def pattern_of(syntax: str, definition: str) -> str:
    """Return a regular expression for all texts of a grammar in OpenAI's notation.

    Args:
        syntax: `"regex"` or `"lark"`.
        definition: The grammar. One in Lark may not be recursive.

    Raises:
        InvalidRequest: The grammar is recursive, too long, or uses a directive.
    """
    inner = definition if syntax == "regex" else _of_lark(definition)
    if len(inner) > MOST_CHARACTERS:
        raise InvalidRequest(
            f"the grammar has {len(inner)} characters as an expression; the limit is "
            f"{MOST_CHARACTERS}, so shorten it."
        )
    return f"^(?:{inner})$"


def _of_lark(definition: str) -> str:
    rules, imported = _rules(definition)
    open_rules: list[str] = []
    known: dict[str, str] = {}

    def expanded(name: str) -> str:
        if name in known:
            return known[name]
        if name in open_rules:
            raise InvalidRequest(
                f"rule {name!r} of the grammar is recursive; only a grammar without recursion can "
                "be enforced, so leave the choice of tools to the model."
            )
        if name not in rules:
            if name in imported:
                return imported[name]
            raise InvalidRequest(f"the grammar has no rule {name!r}; define or import it.")
        open_rules.append(name)
        known[name] = _Reader(rules[name], expanded).alternatives()
        open_rules.pop()
        if len(known[name]) > MOST_CHARACTERS:
            raise InvalidRequest(
                f"rule {name!r} of the grammar is longer than {MOST_CHARACTERS} characters as an "
                "expression; shorten it."
            )
        return known[name]

    return expanded("start")


def _rules(definition: str) -> tuple[dict[str, list[_Token]], dict[str, str]]:
    """Return the rules of a grammar as tokens, and its imported terminals."""
    rules: dict[str, list[_Token]] = {}
    imported: dict[str, str] = {}
    current: list[_Token] = []
    tokens = _tokens(definition)
    for index, (kind, text) in enumerate(tokens):
        if kind == "directive":
            _take(text, imported)
        elif kind == "name" and _opens_a_rule(tokens, index):
            current = rules.setdefault(text.lstrip("?!"), [])
        elif not (kind == "line" or (kind == "priority" and not current)):
            current.append((kind, text))
    return {name: rule[1:] for name, rule in rules.items()}, imported  # without the colon


def _opens_a_rule(tokens: list[_Token], index: int) -> bool:
    if index and tokens[index - 1][0] not in ("line", "directive"):
        return False
    after = [each for each in tokens[index + 1 : index + 3] if each[0] != "priority"]
    return bool(after) and after[0] == ("mark", ":")


def _tokens(definition: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(definition):
        match = _TOKEN.match(definition, at)
        if match is None:
            line = definition.count("\n", 0, at) + 1
            raise InvalidRequest(
                f"the grammar cannot be read at {definition[at : at + 12]!r} in line {line}."
            )
        at = match.end()
        if match.lastgroup and match.lastgroup != "space":
            tokens.append((match.lastgroup, match[0]))
    return tokens


def _take(directive: str, imported: dict[str, str]) -> None:
    """Read `%import common.NAME`, with `-> OTHER` or as `common (NAME, OTHER)`."""
    match = re.fullmatch(
        r"%import\s+common\s*(?:\.\s*(\w+)(?:\s*->\s*(\w+))?|\(([\w,\s]+)\))\s*(?://.*)?", directive
    )
    if match is None:
        raise InvalidRequest(
            f"the grammar's {directive.split()[0]} cannot be enforced; use only rules, terminals "
            "and %import common."
        )
    names = [match[1]] if match[1] else [each.strip() for each in match[3].split(",")]
    for name in names:
        if name not in _COMMON:
            raise InvalidRequest(f"Lark's library has no terminal {name!r}.")
        imported[match[2] or name] = _COMMON[name]


class _Reader:
    """Reader of one rule."""

    def __init__(self, tokens: list[_Token], expanded: Callable[[str], str]) -> None:
        self._tokens = tokens
        self._expanded = expanded
        self._at = 0

    def alternatives(self, close: str = "") -> str:
        """Return alternatives up to a closing mark."""
        branches = [""]
        while True:
            kind, text = self._next(close)
            if kind == "end" or (kind == "mark" and text == close):
                break
            if kind == "alias":
                continue
            if text == "|" and kind == "mark":
                branches.append("")
            else:
                branches[-1] += self._repeated(self._atom(kind, text))
        return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

    def _next(self, close: str) -> _Token:
        if self._at == len(self._tokens):
            if close:
                raise InvalidRequest(f"the grammar lacks a closing {close!r}.")
            return "end", ""
        self._at += 1
        return self._tokens[self._at - 1]

    def _atom(self, kind: str, text: str) -> str:
        match kind, text:
            case "string", _:
                flag = "i" if text.endswith("i") else ""
                literal = _unquoted(text.removesuffix("i"))
                return f"(?{flag}:{_SPECIAL.sub(_escaped, literal)})"
            case "regex", _:
                body, _, flags = text[1:].rpartition("/")
                flags = flags.replace("l", "").replace("u", "")
                return f"(?{flags}:{body.replace(chr(92) + '/', '/')})"
            case "name", _:
                return f"(?:{self._expanded(text)})"
            case "mark", "(":
                return f"(?:{self.alternatives(')')})"
            case "mark", "[":
                return f"(?:{self.alternatives(']')})?"
            case _:
                raise InvalidRequest(f"the grammar has {text!r} in a place that cannot be read.")

    def _repeated(self, atom: str) -> str:
        if self._at == len(self._tokens):
            return atom
        kind, text = self._tokens[self._at]
        if kind == "mark" and text in "?*+":
            self._at += 1
            return f"(?:{atom}){text}"
        if kind == "count":
            self._at += 1
            least, _, most = text[1:].replace(" ", "").partition("..")
            return f"(?:{atom}){{{least}{',' + most if most else ''}}}"
        return atom


_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/\n\r\t]")


def _escaped(match: re.Match[str]) -> str:
    return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(match[0], "\\" + match[0])


def _unquoted(text: str) -> str:
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidRequest(f"the grammar's string {text} has an unknown escape.") from None
