"""Samples for training code: padded tensors, columns, JSON lines, Parquet. Written samples are
read back exactly.

The type of a field in `TrainingSample` determines how it is written:

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

Floats keep all their digits. In JSON, nan is `null` and infinity is `"Infinity"`.

`seed` is unsigned in Parquet. All columns must be present, and no others, except that a missing
`group_id` is read as None. Any other missing column is rejected by name, since its values are
unknown. To read a file from before the field existed, add the column with the field's default.

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
from nano_inference.data.receipts import sealed

__all__ = [
    "DataError",
    "from_columns",
    "json_line",
    "pad_samples",
    "read_jsonl",
    "read_parquet",
    "sealed",
    "to_columns",
    "write_jsonl",
    "write_parquet",
]
