"""Trainer's side of weights in the memory of a card (CUDA IPC): the JSON of
`POST /update_weights_from_ipc`, without a pickle.
"""

import base64
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from nano_inference.arrays import dtype_name
from nano_inference.errors import WeightUpdateError
from nano_inference.parallel.shared_tensors import Offer, SharedStorage, SharedTensor


def lend(weights: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return the field `offers` for tensors on one card, by checkpoint name.

    Keep the tensors and do not write to them until the server has answered. It copies them, so you
    may reuse their memory afterwards. Each call lends the tensors once: call it again to repeat a
    request.

    Raises:
        WeightUpdateError: A tensor is not on a card, or not all are on the same one.
    """
    storages: list[SharedStorage] = []
    tensors: list[SharedTensor] = []
    for name, weight in weights.items():
        if weight.device.type != "cuda":
            raise WeightUpdateError(
                f"{name!r} is on {weight.device}; only memory of a card is lent."
            )
        tensors.append(
            SharedTensor(
                name,
                dtype_name(weight.dtype),
                tuple(weight.shape),
                int(weight.storage_offset()) * weight.itemsize,
                len(storages),
                tuple(weight.stride()),
            )
        )
        storages.append(_lent_storage(weight))
    offer = Offer(tuple(storages), tuple(tensors))
    if len(offer.cards) != 1:
        raise WeightUpdateError(
            f"the weights are on {len(offer.cards)} cards; lend those of one card at a time."
        )
    return [asdict(offer, dict_factory=_as_json)]


def _lent_storage(weight: Tensor) -> SharedStorage:
    storage: Any = weight.untyped_storage()
    device, handle, size, offset, counter, index, event, waits = storage._share_cuda_()
    return SharedStorage(
        card=str(torch.cuda.get_device_properties(device).uuid),
        handle=handle,
        size=size,
        offset=offset,
        counter=counter.decode(),
        counter_index=index,
        event=event,
        waits=waits,
    )


def _as_json(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {
        name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for name, value in items
    }
