"""The built kernels as a ctypes library; its structures and functions are read from the C++
sources that declare them.

Only what those sources use is understood: structures of numbers, pointers, arrays of a constant
length and each other, and functions declared `extern "C"`. A pointer is an address. A structure
that stands in another as the only one of its type lends it its fields.
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
_FUNCTION = re.compile(r"(\w+)(\*?) (nano_\w+)\(([^()]*)\)")


@cache
def _text() -> str:
    sources = sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")))
    return re.sub(r"//[^\n]*", "", "\n".join(each.read_text("utf-8") for each in sources))


@cache
def struct(name: str) -> Any:
    """A structure of the kernels as a class of `ctypes`."""
    body = dict(_STRUCT.findall(_text()))[name]
    constants: dict[str, int] = {}
    for each in _CONSTANT.findall(body):
        constants |= {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", each)}
    found: list[tuple[str, Any]] = []
    for line in _METHOD.sub("", _CONSTANT.sub("", body)).split(";"):
        declared = _DECLARED.match(line.strip())
        for part in declared[2].split(",") if declared else ():
            found.append(_field(declared[1], part, constants))  # pyright: ignore
    counts = Counter(kind for _, kind in found)
    lent = [key for key, kind in found if hasattr(kind, "_fields_") and counts[kind] == 1]
    return type(name, (ctypes.Structure,), {"_anonymous_": lent, "_fields_": found})


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
    underlying = dict(_ENUM.findall(_text())).get(name, name)
    return _TYPES[underlying] if underlying in _TYPES else struct(underlying)


def declare_functions(library: ctypes.CDLL) -> None:
    """Say of each function of the kernels what it takes and gives."""
    for kind, pointer, name, arguments in _FUNCTION.findall(_text()):
        if kind == "return" or not hasattr(library, name):
            continue
        function = getattr(library, name)
        function.restype = ctypes.c_void_p if pointer else _TYPES[kind]
        function.argtypes = [
            ctypes.c_void_p if "*" in each else _TYPES[each.split()[0]]
            for each in arguments.split(",")
            if each.strip()
        ]


def open_library(path: Path) -> ctypes.CDLL:
    """The kernels that were built there. Raises `KernelsUnavailable`."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as problem:
        raise KernelsUnavailable(
            f"the CPU kernels cannot be loaded from {path}: {problem}"
        ) from problem
    sizes = (ctypes.c_int64 * 3)()
    library.nano_sizes(sizes)
    if list(sizes) != [ctypes.sizeof(struct(name)) for name in ("Op", "ProgramSpec", "Step")]:
        raise KernelsUnavailable(f"{path} was built from another source than this package's.")
    declare_functions(library)
    return library


@cache
def load(instruction_set: str | None = None) -> ctypes.CDLL:
    """The kernels of an instruction set, by default the best here; built if need be. Raises
    `KernelsUnavailable`.
    """
    return open_library(build(instruction_set or best_instruction_set()))
