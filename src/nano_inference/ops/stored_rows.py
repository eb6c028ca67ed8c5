"""Bounds checks for reads and writes of a stored weight's rows."""

from nano_inference.arrays import Tensor


def require_rows(shape: tuple[int, ...], start: int, tensor: Tensor) -> None:
    """Raise `ValueError` unless `tensor` [n, columns] can be rows [start, start + n) of a weight of
    this shape [rows, columns].
    """
    rows, columns = shape
    fits = tensor.dim() == 2 and tensor.shape[1] == columns
    if not fits or not 0 <= start <= rows - len(tensor):
        raise ValueError(
            f"rows of shape {tuple(tensor.shape)} do not fit at row {start} of a weight of shape "
            f"{tuple(shape)}."
        )


def count_rows(rows: int, start: int, count: int | None) -> int:
    """Return the number of rows in [start, start + count). None: all remaining rows. Raise
    `ValueError` unless a weight with `rows` rows contains them.
    """
    count = rows - start if count is None else count
    if not 0 <= start <= rows - count:
        raise ValueError(
            f"rows {start} to {start + count} are not within the weight's {rows} rows."
        )
    return count
