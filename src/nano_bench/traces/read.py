"""Read a trace in one of the public formats, which its first object identifies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nano_bench.traces.dag import dag_trace
from nano_bench.traces.model import Trace, TraceError
from nano_bench.traces.mooncake import mooncake_trace
from nano_bench.traces.records import Record, records_of
from nano_bench.traces.weka import weka_trace
from nano_inference.errors import ConfigError


@dataclass(frozen=True)
class _Format:
    """A public format: a field that only its objects have, and its reader."""

    fields: tuple[str, ...]
    read: Callable[[Sequence[Record]], Trace]


FORMATS: Mapping[str, _Format] = {
    "weka": _Format(("requests",), weka_trace),
    "dag": _Format(("turns", "orchestrator"), dag_trace),
    "mooncake": _Format(("input_length", "messages"), mooncake_trace),
}


def read_trace(path: Path) -> Trace:
    """Read a file, or the JSON files of a folder. Raises `ConfigError`, as `TraceError` with the
    line if the content is invalid.
    """
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    records: list[Record] = []
    file = path
    try:
        for file in files:
            records += records_of(file)
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"cannot read {file}: {problem}.") from None
    except TraceError as problem:
        raise _at(file, problem) from None
    if not records:
        raise ConfigError(f"{path} contains no requests.")
    try:
        return _format_of(records[0]).read(records)
    except TraceError as problem:
        raise _at(path, problem) from None


def _at(path: Path, problem: TraceError) -> TraceError:
    return TraceError(problem.line, problem.what, path.name)


def _format_of(record: Record) -> _Format:
    for known in FORMATS.values():
        if any(field in record.fields for field in known.fields):
            return known
    fields = " or ".join(field for known in FORMATS.values() for field in known.fields)
    raise record.error(f"no known format: the object has none of {fields}.")
