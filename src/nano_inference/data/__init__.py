"""Samples for training code: padded tensors, columns, JSON lines, Parquet. Written samples are
read back exactly.

How a field is written follows from its type in `TrainingSample`:

| type                        | column                     | Parquet  | JSON             |
|-----------------------------|----------------------------|----------|------------------|
| `int`, `str`, `bool`        | itself                     | int64, … | itself           |
| `bytes`                     | base64                     | string   | string           |
| `float`                     | itself                     | double   | number           |
| `tuple[X, ...]`             | list                       | list     | array            |
| `frozenset[X]`              | sorted list                | list     | array            |
| `Mapping[X, Y]`             | list of `{"key", "value"}` | list     | array of objects |
| a record like `VersionSpan` | dict                       | struct   | object           |
| `int` or `str`              | `{"int": 2, "str": None}`  | struct   | object           |
| `X` or `None`               | None, or as X              | null     | `null`           |

A number of type float has all its digits; in JSON nan is `null`, and infinity `"Infinity"`.

`seed` is unsigned in Parquet. Every column must be there, and none besides: a file that was written
before a field existed is refused by the name of the missing column, since it is not known what it
would have held. Add the column with the field's default to read such a file.

Imports only from the base modules.
"""

from nano_inference.data.columns import DataError, from_columns, to_columns
from nano_inference.data.files import (
    json_line,
    read_jsonl,
    read_parquet,
    write_jsonl,
    write_parquet,
)
from nano_inference.data.padding import pad_samples

__all__ = [
    "DataError",
    "from_columns",
    "json_line",
    "pad_samples",
    "read_jsonl",
    "read_parquet",
    "to_columns",
    "write_jsonl",
    "write_parquet",
]
