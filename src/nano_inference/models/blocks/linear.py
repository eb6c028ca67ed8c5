"""Products of rows and weights: `Linear`, and a version with input columns spread over ranks."""

from functools import partial

from nano_inference.models.blocks.step import Block, ModelPart, Step
from nano_inference.ops.interface import X


class Linear:
    """A product of rows and a weight, with its bias and the contribution of adapters.

    Args:
        part: Part of the model that holds the weight.
        name: Name of the weight.
        segments: Bounds of the columns that are summed separately. None: one segment.
    """

    def __init__(self, part: ModelPart, name: str, segments: tuple[int, ...] | None = None) -> None:
        self.name, self.segments = name, segments
        self.weight, self.bias = part.params[name], part.params.get(name + "_bias")

    def __call__(self, step: Step[X], x: X) -> X:
        y = step.ops.linear(x, self.weight, self.bias, self.segments)
        return step.ops.lora(y, x, self.name, step.batch) if step.batch.adapters else y


class SummedLinear:
    """A product whose input columns are spread over tensor ranks.

    Each rank sums its own columns, then the ranks add up their sums. Adapters sum all columns in
    one order, so each rank gathers them and adds the whole adapter.

    Args:
        part: Part of the model that holds the weight.
        name: Name of the weight.
        columns: Input columns of each tensor rank.
        segments: As in `Linear`, for this rank's columns.
    """

    def __init__(
        self,
        part: ModelPart,
        name: str,
        columns: tuple[int, ...],
        segments: tuple[int, ...] | None = None,
    ) -> None:
        self.name, self.columns = name, columns
        self.weight, self.bias = part.params[name], part.params.get(name + "_bias")
        self.segments = segments if segments is not None else (0, self.weight.shape[1])
        self.hidden_size, self.float32 = part.spec.hidden_size, part.float32
        self.dtype = part.dtype
        self.exchange = part.exchange

    def __call__(self, step: Step[X], x: X) -> X:
        bias = None if self.bias is None else self.bias.float()
        add_up = partial(self.exchange.add_up, bias=bias)
        partial_sum = step.ops.linear(x, self.weight, None, self.segments)
        y = step.ops.call(step.batch, add_up, (partial_sum,), self.hidden_size, self.float32)
        if not step.batch.adapters:
            return y
        gather = partial(self.exchange.gather_columns, counts=self.columns)
        whole = step.ops.call(step.batch, gather, (x,), sum(self.columns), self.dtype)
        return step.ops.lora(y, whole, self.name, step.batch)


def row_parallel(
    part: ModelPart, name: str, columns: tuple[int, ...], segments: tuple[int, ...] | None
) -> Block:
    """Return the output product of a block, whose input has `columns` on each tensor rank.

    Columns are summed in `segments` if the backend can, so that the bits do not depend on the
    number of ranks.
    """
    if part.exchange.tensor is not None:
        return SummedLinear(part, name, columns, segments)
    return Linear(part, name, segments if part.ops.in_segments else None)
