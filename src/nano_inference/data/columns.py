"""Conversion of samples to columns of plain values, and back."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nano_inference.data.kinds import FIELDS, Mismatch
from nano_inference.errors import NanoInferenceError
from nano_inference.types import TrainingSample

# Columns that files of older releases lack, and the values to assume.
_ADDED: Mapping[str, Any] = {
    "group_id": None,
    "token_id_logprobs": None,
    "raw_token_id_logprobs": None,
    "prompt_token_id_logprobs": None,
    "receipt": None,
}


class DataError(NanoInferenceError, ValueError):
    """Samples, columns or a file that cannot be converted.

    The message names file, line and column.
    """


def to_columns(samples: Iterable[TrainingSample]) -> dict[str, list[Any]]:
    """Return a list of plain Python values for each field.

    The result is suitable for `datasets.Dataset.from_dict` and `pyarrow.table`. Both infer a
    column's type from its values, and reject a mix of seeds above and below 2**63. The engine draws
    only seeds below. For larger ones of your own, use `write_parquet`, which declares the type.
    """
    rows = list(samples)
    return {
        name: [kind.to_plain(getattr(sample, name)) for sample in rows]
        for name, kind in FIELDS.items()
    }


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[TrainingSample]:
    """Return the samples that `to_columns` converted.

    Raises:
        DataError: A column is missing, unknown or of another length, or has a value of another
            type.
    """
    return samples_of(columns, "the columns", "row")


def samples_of(
    columns: Mapping[str, Sequence[Any]], source: str, row_name: str
) -> list[TrainingSample]:
    """Convert columns to samples.

    Errors name the columns by `source`, and a row by `row_name` and its index.
    """
    check_names(columns, source)
    num_rows = len(columns["prompt_tokens"])
    columns = {name: [value] * num_rows for name, value in _ADDED.items()} | dict(columns)
    lengths = {name: len(columns[name]) for name in FIELDS}
    for name, length in lengths.items():
        if length != num_rows:
            raise DataError(
                f"{source}: column {name!r} has {length} rows, but 'prompt_tokens' has {num_rows}."
            )
    return [
        make_sample({name: columns[name][row] for name in FIELDS}, f"{row_name} {row}")
        for row in range(num_rows)
    ]


def check_names(names: Iterable[str], where: str) -> None:
    """Raise `DataError` unless `names` are exactly the column names."""
    present = set(names)
    for name in sorted(present - FIELDS.keys()):
        near = difflib.get_close_matches(name, FIELDS, n=1)
        raise DataError(
            f"{where}: unknown column {name!r}{f'; did you mean {near[0]!r}?' if near else '.'}"
        )
    for name in FIELDS:
        if name not in present and name not in _ADDED:
            raise DataError(f"{where}: column {name!r} is missing.")


def make_sample(row: Mapping[str, Any], where: str) -> TrainingSample:
    """Convert a row's plain values to a sample. Raises `DataError` that names row and column."""
    values: dict[str, Any] = {}
    row = {**_ADDED, **row}
    for name, kind in FIELDS.items():
        try:
            values[name] = kind.from_plain(row[name])
        except Mismatch as error:
            raise DataError(f"{where}, column {name!r}: {error}") from None
    return TrainingSample(**values)
