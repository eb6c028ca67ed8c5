"""Pickles are read without an import or a call, and whatever else they hold is reported."""

import os
import pickle
import pickletools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.errors import InvalidRequest
from nano_inference.system.pickles import MOST_BYTES, Called, Named, read_pickle
from tests.depth import at_depth

WHAT = "the field"
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(-9, 2**40), inner, max_size=4)
    ),
    max_leaves=30,
)


class Box:
    """Class with a state and arguments."""

    def __init__(self, size: int = 0) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        raise AssertionError("never called")

    __hash__ = None  # pyright: ignore[reportAssignmentType]


BOX = f"{__name__}.Box"


@settings(max_examples=at_depth(200), deadline=None)
@given(VALUES, st.integers(3, 5))
def test_read_pickle_returns_plain_values(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), (), WHAT) == value


@settings(max_examples=at_depth(100), deadline=None)
@given(VALUES, st.integers(3, 5), st.data())
def test_read_pickle_reports_any_truncation(value: Any, protocol: int, data: st.DataObject) -> None:
    content = pickle.dumps(value, protocol)
    length = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(InvalidRequest, match="the field"):
        read_pickle(content[:length], (), WHAT)


@settings(max_examples=at_depth(300), deadline=None)
@given(st.binary(max_size=60), VALUES, st.data())
def test_read_pickle_survives_any_bytes(noise: bytes, value: Any, data: st.DataObject) -> None:
    """Damaged pickles raise one error, or are other plain values."""
    content = pickle.dumps(value)
    at = data.draw(st.integers(0, len(content)))
    for damaged in (noise, content[:at] + noise + content[at + len(noise) :]):
        try:
            read_pickle(damaged, (), WHAT)
        except InvalidRequest:
            continue


@pytest.mark.parametrize("protocol", range(3, 6))
def test_read_pickle_records_known_calls(protocol: int) -> None:
    box = read_pickle(pickle.dumps(Box(7), protocol), (BOX, "copy_reg._reconstructor"), WHAT)
    assert isinstance(box, Called)
    assert (box.name, box.arguments, box.state) == (BOX, (), {"size": 7})
    assert read_pickle(pickle.dumps(Box, protocol), {BOX}, WHAT) == Named(BOX)


class Runs:
    """Object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(3, 6))
@pytest.mark.parametrize(
    "function", [os.system, eval, exec, getattr, Path.touch, __import__, pickle.loads]
)
def test_read_pickle_names_a_function_it_rejects(
    function: Any, protocol: int, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    content = pickle.dumps([Runs(function, str(mark))], protocol)
    name = function.__name__ if protocol > 3 else r"\w+"  # 3 names a method by a call of getattr
    with pytest.raises(InvalidRequest, match=rf"names '[\w.]*\b{name}', which is not allowed"):
        read_pickle(content, {BOX}, WHAT)
    assert not mark.exists()


def test_read_pickle_imports_nothing() -> None:
    content = b"\x80\x04\x8c\x04this\x8c\x01s\x93."
    before = set(sys.modules)
    with pytest.raises(InvalidRequest, match=r"'this\.s'"):
        read_pickle(content, (), WHAT)
    assert read_pickle(content, {"this.s"}, WHAT) == Named("this.s")
    assert set(sys.modules) == before


OTHERS = [
    *("INT", "LONG", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "FLOAT", "PUT", "GET"),
    *("NEXT_BUFFER", "READONLY_BUFFER", "LIST", "DICT", "EMPTY_SET", "ADDITEMS", "FROZENSET"),
    *("POP", "DUP", "POP_MARK", "EXT1", "EXT2", "EXT4", "INST", "OBJ", "NEWOBJ_EX"),
    *("PERSID", "BINPERSID"),
]
CODES = {each.name: each.code.encode("latin-1") for each in pickletools.opcodes}
ARGUMENTS = {"STRING": b"'a'\n", "BINSTRING": b"\1\0\0\0a", "SHORT_BINSTRING": b"\1a"}


@pytest.mark.parametrize("name", OTHERS)
def test_read_pickle_rejects_other_opcodes(name: str) -> None:
    """Opcodes that make objects by other means, or that today's pickles lack, are named."""
    argument = ARGUMENTS.get(name, b"1\n1\n" + b"0" * 16)
    with pytest.raises(InvalidRequest, match=rf"opcode {name},"):
        read_pickle(b"\x80\x04NN(" + CODES[name] + argument + b".", (), WHAT)


def test_read_pickle_never_hashes_nested_keys() -> None:
    """A key of 60 nested pairs would take 2^60 steps to hash."""
    nested: Any = ()
    for _ in range(60):
        nested = (nested, nested)
    content = pickle.dumps(nested)[:-1]  # without STOP
    with pytest.raises(InvalidRequest, match="not a whole pickle"):
        read_pickle(b"\x80\x04}" + content[2:] + b"Ks.", (), WHAT)


def test_read_pickle_bounds_the_length() -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MOST_BYTES}"):
        read_pickle(b"N" * (MOST_BYTES + 1), (), WHAT)
