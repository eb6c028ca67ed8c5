"""Weights in memory that a trainer on the same card lends (CUDA IPC): opened, copied and closed
within one call.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.parallel.card_memory import Card
from nano_inference.parallel.shared_tensors import (
    Offer,
    SharedTensor,
    check_offer,
    check_place,
    chosen_offer,
    extent,
    require_lenders,
)
from nano_inference.weights.transports import wire
from nano_inference.weights.transports.interface import Shapes


@contextmanager
def borrowed(
    offers: Sequence[Offer], card: Card, shapes: Shapes, seen: set[str]
) -> Iterator[dict[str, Tensor]]:
    """Open the offer for a card, and yield its tensors by checkpoint name. Copy them in the block.

    All descriptions are checked before the first handle is opened. The handles are closed after
    the block and after an error. The block fails if a lending process has ended meanwhile, since
    its memory may be incomplete.

    Args:
        offers: Offers of the trainer, one for each card.
        card: The engine's card.
        shapes: Shapes of the model's tensors.
        seen: Names received earlier in the same update. The offer's names are added to it.

    Raises:
        WeightUpdateError: No offer is for this card, or a description does not fit.
        WeightTransferError: A lending process has ended, or a handle cannot be opened.
    """
    offer = chosen_offer(offers, card.uuid)
    check_offer(offer)
    described = wire.described(
        ((each.name, each.dtype, each.shape) for each in offer.tensors), shapes, seen
    )
    if not described:
        raise WeightUpdateError("nothing to receive: the offer has no tensors.")
    for tensor, info in zip(offer.tensors, described, strict=True):
        check_place(tensor, info.itemsize, offer.storages[tensor.storage])
    require_lenders(offer.storages)
    opened: list[Tensor] = []
    tensors: dict[str, Tensor] = {}
    try:
        opened += (card.open(storage) for storage in offer.storages)
        for tensor, info in zip(offer.tensors, described, strict=True):
            tensors[tensor.name] = _view(tensor, info, opened[tensor.storage])
        yield tensors
        card.settle()
        require_lenders(offer.storages)
    except BaseException as problem:
        # views in the frames of an error would keep the handles open
        traceback.clear_frames(problem.__traceback__)
        raise
    finally:
        opened.clear()
        tensors.clear()


def _view(tensor: SharedTensor, info: wire.TensorInfo, content: Tensor) -> Tensor:
    size = extent(tensor) * info.itemsize
    flat = wire.tensor_of(
        wire.TensorInfo(info.name, info.dtype, (extent(tensor),)),
        content[tensor.start : tensor.start + size],
    )
    if tensor.strides is None or 0 in tensor.shape:
        return flat.view(tensor.shape)
    return flat.as_strided(tensor.shape, tensor.strides)
