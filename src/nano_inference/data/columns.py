"""Samples as columns of plain values, and back."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nano_inference.data.kinds import FIELDS, Mismatch
from nano_inference.errors import NanoInferenceError
from nano_inference.types import TrainingSample

# Columns that files of older releases lack, and the values that stand for them.
_ADDED: Mapping[str, Any] = {"group_id": None}


class DataError(NanoInferenceError, ValueError):
    """Samples, columns or a file that cannot be converted. The message names the file, the line and
    the column.
    """


def to_columns(samples: Iterable[TrainingSample]) -> dict[str, list[Any]]:
    """One list for each field, of plain Python values, for `datasets.Dataset.from_dict` or
    `pyarrow.table`.

    Those two guess a column's type from its values and refuse seeds of 2**63 and more beside
    smaller ones. The engine draws none; for a caller's own ones `write_parquet` has the type.
    """
    rows = list(samples)
    return {
        name: [kind.to_plain(getattr(sample, name)) for sample in rows]
        for name, kind in FIELDS.items()
    }


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[TrainingSample]:
    """The samples that `to_columns` was given.

    Raises:
        DataError: a column is missing, unknown, of another length, or holds a value of another
            type.
    """
    return samples_of(columns, "the columns", "row")


def samples_of(
    columns: Mapping[str, Sequence[Any]], source: str, row_name: str
) -> list[TrainingSample]:
    """As `from_columns`; errors call the whole `source` and a row `row_name` and its number."""
    check_names(columns, source)
    num_rows = len(columns["prompt_tokens"])
    columns = {name: [value] * num_rows for name, value in _ADDED.items()} | dict(columns)
    lengths = {name: len(columns[name]) for name in FIELDS}
    for name, length in lengths.items():
        if length != num_rows:
            raise DataError(
                f"{source}: column {name!r} has {length} rows and 'prompt_tokens' has {num_rows}."
            )
    return [
        make_sample({name: columns[name][row] for name in FIELDS}, f"{row_name} {row}")
        for row in range(num_rows)
    ]


def check_names(names: Iterable[str], where: str) -> None:
    """Raise `DataError` unless `names` are those of all columns."""
    given = set(names)
    for name in sorted(given - FIELDS.keys()):
        near = difflib.get_close_matches(name, FIELDS, n=1)
        raise DataError(
            f"{where}: unknown column {name!r}{f'; did you mean {near[0]!r}?' if near else '.'}"
        )
    for name in FIELDS:
        if name not in given and name not in _ADDED:
            raise DataError(f"{where}: column {name!r} is missing.")


def make_sample(row: Mapping[str, Any], where: str) -> TrainingSample:
    """The sample of a row's plain values. Raises `DataError` with the place and the column."""
    values: dict[str, Any] = {}
    row = {**_ADDED, **row}
    for name, kind in FIELDS.items():
        try:
            values[name] = kind.from_plain(row[name])
        except Mismatch as error:
            raise DataError(f"{where}, column {name!r}: {error}") from None
    return TrainingSample(**values)
