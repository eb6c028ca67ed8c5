"""Rows of a stored weight that are written or read: whether there are such ones."""

from torch import Tensor


def require_rows(shape: tuple[int, ...], start: int, tensor: Tensor) -> None:
    """Raise `ValueError` unless `tensor` [n, columns] can be rows [start, start + n) of a weight of
    this shape [rows, columns].
    """
    rows, columns = shape
    fits = tensor.dim() == 2 and tensor.shape[1] == columns
    if not fits or not 0 <= start <= rows - len(tensor):
        raise ValueError(
            f"rows of shape {tuple(tensor.shape)} do not fit at {start} into {tuple(shape)}."
        )


def count_rows(rows: int, start: int, count: int | None) -> int:
    """How many rows [start, start + count) are; None: all that follow. Raises `ValueError` unless a
    weight of so many rows has them.
    """
    count = rows - start if count is None else count
    if not 0 <= start <= rows - count:
        raise ValueError(f"rows {start} to {start + count} are not within {rows}.")
    return count
