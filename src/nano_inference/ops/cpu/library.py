"""The built kernels as a ctypes library. Structures and functions are parsed from the C++ sources
that declare them.

The parser only understands the constructs of those sources: functions declared `extern "C"`, and
structures of numbers, pointers, arrays of a constant length and other structures. A pointer is an
address. A nested structure whose type occurs once in its parent is anonymous: its fields are also
fields of the parent.
"""

import ctypes
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from nano_inference.ops.cpu.build import KernelsUnavailable, best_instruction_set, build

SOURCES = Path(__file__).parent / "kernels"
_TYPES: dict[str, Any] = {
    "void": None,
    "bool": ctypes.c_bool,
    "int": ctypes.c_int,
    "int8_t": ctypes.c_int8,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_STRUCT = re.compile(r"^struct (\w+) \{(.*?)^\};", re.MULTILINE | re.DOTALL)
_ENUM = re.compile(r"enum class (\w+) : (\w+)")
_METHOD = re.compile(r"[^;{}]*\([^;{}]*\) const \{[^{}]*\}")
_CONSTANT = re.compile(r"static constexpr int (.*?);")
_DECLARED = re.compile(r"(?:const |struct )*(\w+)(.*)", re.DOTALL)
_FUNCTION = re.compile(
    r'^(?:extern "C" )?(?:const )?(\w+)(\*?) (nano_\w+)\(([^()]*)\)', re.MULTILINE
)


@cache
def _text() -> str:
    sources = sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")))
    return re.sub(r"//[^\n]*", "", "\n".join(each.read_text("utf-8") for each in sources))


@cache
def _structs() -> dict[str, str]:
    """Return the body of each structure, by name."""
    return dict(_STRUCT.findall(_text()))


@cache
def _enums() -> dict[str, str]:
    """Return the underlying type of each enumeration, by name."""
    return dict(_ENUM.findall(_text()))


@cache
def struct(name: str) -> Any:
    """Return a structure of the kernels as a `ctypes` class."""
    body = _structs()[name]
    constants: dict[str, int] = {}
    for text in _CONSTANT.findall(body):
        constants |= {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", text)}
    declarations: list[tuple[str, Any]] = []
    for line in _METHOD.sub("", _CONSTANT.sub("", body)).split(";"):
        declared = _DECLARED.match(line.strip())
        for part in declared[2].split(",") if declared else ():
            declarations.append(_field(declared[1], part, constants))  # pyright: ignore
    counts = Counter(kind for _, kind in declarations)
    lent = [key for key, kind in declarations if hasattr(kind, "_fields_") and counts[kind] == 1]
    return type(name, (ctypes.Structure,), {"_anonymous_": lent, "_fields_": declarations})


_NAME_AND_SIZE = re.compile(r"[\s*]*(?:const[\s*]*)?(\w+)(?:\[([^]]*)\])?")


def _field(kind: str, declared: str, constants: dict[str, int]) -> tuple[str, Any]:
    name, size = _NAME_AND_SIZE.match(declared).groups()  # pyright: ignore
    if "*" in declared:
        return name, ctypes.c_void_p
    if size is not None:
        terms = (constants.get(term) or int(term) for term in re.split(r"\s*\+\s*", size))
        return name, _type(kind) * sum(terms)
    return name, _type(kind)


def _type(name: str) -> Any:
    underlying = _enums().get(name, name)
    return _TYPES[underlying] if underlying in _TYPES else struct(underlying)


def declare_functions(library: ctypes.CDLL) -> None:
    """Declare the argument and result types of all functions of the kernels."""
    for kind, pointer, name, arguments in _FUNCTION.findall(_text()):
        if not hasattr(library, name):
            continue
        function = getattr(library, name)
        function.restype = ctypes.c_void_p if pointer else _TYPES[kind]
        function.argtypes = [
            ctypes.c_void_p if "*" in each else _TYPES[each.split()[0]]
            for each in arguments.split(",")
            if each.strip()
        ]


def open_library(path: Path) -> ctypes.CDLL:
    """Open the built kernels at `path`. Raise `KernelsUnavailable` if they cannot be loaded or do
    not match the sources.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as problem:
        raise KernelsUnavailable(
            f"the CPU kernels cannot be loaded from {path}: {problem}"
        ) from problem
    sizes = (ctypes.c_int64 * 3)()
    library.nano_sizes(sizes)
    if list(sizes) != [ctypes.sizeof(struct(name)) for name in ("Op", "ProgramSpec", "Step")]:
        raise KernelsUnavailable(
            f"{path} was built from another source than this package's; remove it."
        )
    declare_functions(library)
    return library


@cache
def load(instruction_set: str | None = None) -> ctypes.CDLL:
    """Return the kernels of an instruction set, by default the best on this machine, and build them
    if necessary. Raise `KernelsUnavailable` on failure.
    """
    return open_library(build(instruction_set or best_instruction_set()))
