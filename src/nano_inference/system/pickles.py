"""Reader of pickles that imports no name and calls nothing.

Trainers pickle handles of shared memory and ids of groups. The standard library's reader would call
whatever a pickle names. This one interprets a fixed set of opcodes, and represents a call of a
known name by a record.
"""

import pickletools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from nano_inference.errors import InvalidRequest

FIRST_BYTE = b"\x80"  # every pickle since protocol 2 begins with it
MOST_BYTES = 2**26  # limit of a pickle
_MOST_NAME = 200  # characters of a rejected name in an error message


@dataclass(frozen=True, slots=True)
class Named:
    """Name of a class, function or constant, "module.name", which was not imported."""

    name: str


@dataclass(slots=True, eq=False)
class Called:
    """Call of a known name, which was not made.

    Attributes:
        name: Name of the called class or function.
        arguments: Its positional arguments.
        state: Attributes that the object would get afterwards, by name.
    """

    name: str
    arguments: tuple[Any, ...]
    state: dict[str, Any] = field(default_factory=dict[str, Any])


def read_pickle(content: bytes | bytearray, known: Collection[str], what: str) -> Any:
    """Return the object of a pickle of protocol 3 to 5.

    It consists of None, bool, int, float, str, bytes, list, tuple, dict, `Named` and `Called`.
    Lists and dicts may contain themselves, so walk only as deep as you expect.

    Args:
        content: The pickle.
        known: Names that it may contain, "module.name".
        what: Name of the content for error messages.

    Raises:
        InvalidRequest: The pickle is truncated or too long, contains a name that is not known, or
            an opcode that is not supported. The message gives the name or the opcode.
    """
    if len(content) > MOST_BYTES:
        raise InvalidRequest(
            f"{what} has {len(content)} bytes; a pickle may have at most {MOST_BYTES}."
        )
    reader = _Reader(known, what)
    try:
        for opcode, argument, _ in pickletools.genops(bytes(content)):
            reader.take(opcode.name, argument)
    except InvalidRequest:
        raise
    # an empty stack, an unknown mark or memo, an argument of another type, or the end of the bytes
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as problem:
        raise InvalidRequest(f"{what} is not a whole pickle; send all of its bytes.") from problem
    return reader.result()


class _Mark:
    """Mark on the stack."""


_MARK = _Mark()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
_EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset(("PROTO", "FRAME", "STOP"))


class _Reader:
    """Stack and memo of a pickle that is being read."""

    def __init__(self, known: Collection[str], what: str) -> None:
        self._known, self._what = known, what
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def take(self, opcode: str, argument: Any) -> None:
        """Interpret the next opcode."""
        push = self._stack.append
        if opcode in _VALUES:
            push(argument)
        elif opcode in _CONSTANTS:
            push(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            push(_EMPTY[opcode]())
        elif opcode in _TUPLES:
            push(tuple(self._last(_TUPLES[opcode])))
        elif opcode in _IGNORED:
            return
        elif opcode in _METHODS:
            _METHODS[opcode](self, argument)
        else:
            raise InvalidRequest(
                f"{self._what} has the pickle opcode {opcode}, which is not supported."
            )

    def result(self) -> Any:
        """Return the object."""
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise InvalidRequest(f"{self._what} is not a whole pickle; send all of its bytes.")
        return self._stack[0]

    # -- opcodes -----------------------------------------------------------------------------------

    def mark(self, _: Any) -> None:
        """Push a mark."""
        self._stack.append(_MARK)

    def tuple_(self, _: Any) -> None:
        """Push a tuple of the items since the mark."""
        self._stack.append(tuple(self._since_mark()))

    def memoize(self, _: Any) -> None:
        """Remember the top of the stack."""
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, index: int) -> None:
        """Remember the top of the stack by a number."""
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        """Push a remembered item."""
        self._stack.append(self._memo[index])

    def append(self, _: Any) -> None:
        """Add an item to a list."""
        (item,) = self._last(1)
        self._top(list).append(item)

    def appends(self, _: Any) -> None:
        """Add the items since the mark to a list."""
        items = self._since_mark()
        self._top(list).extend(items)

    def set_item(self, _: Any) -> None:
        """Add an item to a dict."""
        self._set(self._last(2))

    def set_items(self, _: Any) -> None:
        """Add the items since the mark to a dict."""
        self._set(self._since_mark())

    def global_(self, argument: str) -> None:
        """Push a name of protocol 3."""
        self._name(*argument.split(" ", 1))

    def stack_global(self, _: Any) -> None:
        """Push a name of protocol 4 or 5."""
        self._name(*self._last(2))

    def call(self, _: Any) -> None:
        """Push the record of a call."""
        function, arguments = self._last(2)
        if not isinstance(function, Named) or type(arguments) is not tuple:
            raise TypeError("a call needs a name and a tuple")
        self._stack.append(Called(function.name, arguments))

    def build(self, _: Any) -> None:
        """Add the state to the record of a call."""
        (state,) = self._last(1)
        if type(state) is not dict:
            raise TypeError("a state is not a dict")
        self._top(Called).state.update(state)

    # -- inside ------------------------------------------------------------------------------------

    def _last(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) < count or any(item is _MARK for item in items):
            raise LookupError("the stack is too short")
        del self._stack[-count:]
        return items

    def _since_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _top(self, kind: type[Any]) -> Any:
        if type(self._stack[-1]) is not kind:
            raise TypeError(f"the top of the stack is not a {kind.__name__}")
        return self._stack[-1]

    def _set(self, items: list[Any]) -> None:
        self._top(dict).update(zip(_keys(items[::2]), items[1::2], strict=True))

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name is not a string")
        whole = f"{module}.{name}"
        if whole not in self._known:
            raise InvalidRequest(
                f"{self._what} names {whole[:_MOST_NAME]!r}, which is not allowed in this pickle; "
                "nothing of it was called."
            )
        self._stack.append(Named(whole))


def _keys(keys: list[Any]) -> list[Any]:
    # hashing nested tuples may take time that is exponential in the length of the pickle
    if not all(type(key) in (str, int, Named) for key in keys):
        raise TypeError("a key is neither a string, an integer nor a name")
    return keys


_METHODS: Mapping[str, Callable[[_Reader, Any], None]] = {
    "MARK": _Reader.mark,
    "TUPLE": _Reader.tuple_,
    "MEMOIZE": _Reader.memoize,
    "BINPUT": _Reader.put,
    "LONG_BINPUT": _Reader.put,
    "BINGET": _Reader.get,
    "LONG_BINGET": _Reader.get,
    "APPEND": _Reader.append,
    "APPENDS": _Reader.appends,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items,
    "GLOBAL": _Reader.global_,
    "STACK_GLOBAL": _Reader.stack_global,
    "REDUCE": _Reader.call,
    "NEWOBJ": _Reader.call,
    "BUILD": _Reader.build,
}
