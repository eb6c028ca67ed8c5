"""Samples in files: JSON lines and Parquet."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nano_inference.data.columns import DataError, check_names, make_sample, samples_of, to_columns
from nano_inference.data.kinds import FIELDS, column_type, strict
from nano_inference.errors import ConfigError
from nano_inference.types import TrainingSample


def write_jsonl(samples: Iterable[TrainingSample], path: str | os.PathLike[str]) -> None:
    """Write strict ASCII JSON, a sample per line, with the fields of `TrainingSample` as keys."""
    with Path(path).open("w", encoding="ascii", newline="\n") as file:
        for sample in samples:
            file.write(json_line(sample) + "\n")


def json_line(sample: TrainingSample) -> str:
    """Return one sample in the format of `write_jsonl`, without a line end."""
    return json.dumps(json_row(sample), allow_nan=False)


def json_row(sample: TrainingSample) -> dict[str, Any]:
    """Return the object that `json_line` writes."""
    return {name: strict(kind.to_plain(getattr(sample, name))) for name, kind in FIELDS.items()}


def read_jsonl(path: str | os.PathLike[str]) -> list[TrainingSample]:
    """Read the samples written by `write_jsonl`. Empty lines are skipped.

    Raises:
        DataError: A line is not a JSON object, or a column is missing, unknown or of another type.
        OSError: The file cannot be opened.
    """
    samples: list[TrainingSample] = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{os.fspath(path)}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode(), parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{where} is a {type(row).__name__}; it must be an object with a key for each "
                    "column."
                )
            check_names(row, where)
            samples.append(make_sample(row, where))
    return samples


def write_parquet(samples: Iterable[TrainingSample], path: str | os.PathLike[str]) -> None:
    """Write a Parquet file with one column for each field. Needs pyarrow.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: A value does not fit its column, such as an integer beyond 64 bits.
    """
    pa, parquet = _pyarrow()
    arrays: dict[str, Any] = {}
    for name, values in to_columns(samples).items():
        kind = column_type(pa, name, FIELDS[name])
        try:
            arrays[name] = pa.array(values, type=kind)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            raise DataError(
                f"column {name!r} cannot be written to {os.fspath(path)} as {kind}: {error}"
            ) from error
    with Path(path).open("wb") as file:
        parquet.write_table(pa.table(arrays), file)


def read_parquet(path: str | os.PathLike[str]) -> list[TrainingSample]:
    """Read the samples written by `write_parquet`. Needs pyarrow.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: The file is not Parquet, or a column is missing, unknown or of another type.
        OSError: The file cannot be opened.
    """
    pa, parquet = _pyarrow()
    with Path(path).open("rb") as file:
        try:
            columns = parquet.read_table(file).to_pydict()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{os.fspath(path)} is not a readable Parquet file: {error}") from error
    return samples_of(columns, os.fspath(path), f"{os.fspath(path)}, row")


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet files need pyarrow; install it with `pip install 'nano-inference[data]'`, or "
            "use JSON lines."
        ) from error
    return pa, parquet


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number (write nan as null)")
