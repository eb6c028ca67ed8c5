"""Operations on the last dimension that numpy and torch name differently."""

from nano_inference.arrays.names import Tensor
from nano_inference.arrays.namespace import namespace


def with_columns(array: Tensor, columns: int) -> Tensor:
    """Return an array whose last dimension has at least `columns` numbers, the missing ones 0."""
    missing = columns - array.shape[-1]
    if missing <= 0:
        return array
    return namespace(array).cat([array, array.new_zeros((*array.shape[:-1], missing))], dim=-1)
