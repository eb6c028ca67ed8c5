"""Trainer's side of memory on a card, and the engine's use of torch to open it, as far as a machine
without a card can test them: torch's two private functions have stand-ins.
"""

import base64
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nano_inference.errors import WeightTransferError, WeightUpdateError
from nano_inference.parallel.card_memory import CudaCard, card_of
from nano_inference.parallel.shared_tensors import SharedStorage
from nano_inference.server.trainers.handles import offers_of_json
from nano_inference.weights.transports.lending import lend

UUID = "8e0b1c5a-0000-4a6e-9d1f-000000000001"
STORAGE = SharedStorage(
    UUID, b"\x02c" + b"h" * 64, 256, 512, "/torch_7_8_9", 3, b"e" * 64, waits=True
)


class OnCard:
    """Tensor that claims to be on a card, with the attributes that `lend` reads."""

    def __init__(self, tensor: torch.Tensor, device: int = 0) -> None:
        self.tensor, self.device = tensor, torch.device("cuda", device)
        self.dtype, self.shape, self.itemsize = tensor.dtype, tensor.shape, tensor.itemsize
        self.storage_offset, self.stride = tensor.storage_offset, tensor.stride

    def untyped_storage(self) -> Any:
        storage = STORAGE
        return SimpleNamespace(
            _share_cuda_=lambda: (
                *(self.device.index, storage.handle, storage.size, storage.offset),
                *(storage.counter.encode(), storage.counter_index),
                *(storage.event, storage.waits),
            )
        )


@pytest.fixture(autouse=True)
def _uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=UUID[:-1] + str(getattr(device, "index", device) + 1)),
    )


def test_lent_tensors_have_their_places() -> None:
    """The JSON of a view has its offset in bytes and its strides."""
    whole = torch.zeros(8, 6, dtype=torch.bfloat16)
    weights: dict[str, Any] = {"a": OnCard(whole[2:, 1:4]), "b": OnCard(whole.T)}
    (offer,) = offers_of_json(lend(weights), "offers")
    assert offer.storages == (STORAGE, STORAGE)
    a, b = offer.tensors
    assert (a.name, a.dtype, a.shape, a.start, a.strides) == ("a", "bfloat16", (6, 3), 26, (6, 1))
    assert (b.shape, b.start, b.strides, b.storage) == ((6, 8), 0, (1, 6), 1)


def test_lend_needs_tensors_on_one_card() -> None:
    with pytest.raises(WeightUpdateError, match="'a' is on cpu"):
        lend({"a": torch.zeros(1)})
    weights: dict[str, Any] = {"a": OnCard(torch.zeros(1)), "b": OnCard(torch.zeros(1), 1)}
    with pytest.raises(WeightUpdateError, match="on 2 cards"):
        lend(weights)


def test_card_opens_a_storage_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def opened(*arguments: Any) -> torch.UntypedStorage:
        seen.append(arguments)
        return torch.arange(64, dtype=torch.int32).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
    content = CudaCard(torch.device("cuda:1")).open(STORAGE)
    assert torch.equal(content.view(torch.int32), torch.arange(64, dtype=torch.int32))
    expected = (1, STORAGE.handle, 256, 512, b"/torch_7_8_9", 3, STORAGE.event, True)
    assert seen == [expected]


def test_rejected_handle_names_the_lender(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any) -> None:
        raise RuntimeError("CUDA error: invalid resource handle\nCUDA kernel errors might be …")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
    with pytest.raises(WeightTransferError, match=r"process 7 .*: CUDA error: invalid resource"):
        CudaCard(torch.device("cuda:0")).open(STORAGE)


def test_card_is_that_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert card_of(torch.device("cuda:1")).uuid.endswith("2")
    assert card_of(torch.device("cuda")).uuid.endswith("3")
    with pytest.raises(WeightUpdateError, match="the model is on 'cpu'"):
        card_of(torch.device("cpu"))


def test_handles_are_base64_in_json() -> None:
    weights: dict[str, Any] = {"a": OnCard(torch.zeros(4))}
    (offer,) = lend(weights)
    assert base64.b64decode(offer["storages"][0]["handle"]) == STORAGE.handle
