"""Layers as prime-rl's trainer sends them, from a real process over a compiled stand-in for NCCL, and
descriptions that contradict the model or themselves.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.errors import WeightTransferError, WeightUpdateError
from nano_inference.weights.transports import Deadline
from nano_inference.weights.transports.layer_pickles import LayerPickles, described
from nano_inference.weights.transports.pynccl import join_pynccl
from nano_inference.weights.transports.reuse import ReusedMemory
from nano_inference.weights.transports.trainer_streams import stream_of
from tests.parallel.stand_in import needs_compiler
from tests.parallel.stand_in import stand_in as stand_in
from tests.ports import free_port
from tests.shim.running import script
from tests.shim.tensors import layers

TRAINER = Path(__file__).with_name("layer_trainer.py")
CPU = torch.device("cpu")
PATIENCE = 20.0
TENSORS = {name: tensor for part in layers() for name, tensor in part.items()}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def received(case: str, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    port = free_port()
    tensors: dict[str, Any] = {}
    with script(TRAINER, port, case):
        group = join_pynccl(("127.0.0.1", port), 1, 2, Deadline(PATIENCE), CPU)
        transport = stream_of(group, ReusedMemory())
        assert isinstance(transport, LayerPickles)
        try:
            for bucket in transport.receive(shapes, Deadline(PATIENCE)).buckets:
                tensors |= dict(bucket)  # pyright: ignore
        finally:
            transport.close()
            group.close()
    return tensors


@needs_compiler
@pytest.mark.thorough
@pytest.mark.usefixtures("stand_in")
def test_layers_of_prime_rl_arrive() -> None:
    tensors = received("whole")
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


@needs_compiler
@pytest.mark.thorough
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("case", "shapes", "error", "message"),
    [
        ("executes", SHAPES, WeightUpdateError, r"names 'posix\.mkdir', which is not allowed"),
        ("short", SHAPES, WeightTransferError, "store has closed the connection"),
        ("whole", {"a": (1,)}, WeightUpdateError, "announced 3 parts for a model of 1 tensors"),
        ("whole", {"a": (1,), "b": (2,)}, WeightUpdateError, "is not a tensor of this model"),
    ],
)
def test_other_layers_are_rejected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    shapes: dict[str, tuple[int, ...]],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        received(case, shapes)
    assert not (tmp_path / "ran").exists()


# -- descriptions ----------------------------------------------------------------------------------

WEIGHT = ("layers.0.weight", torch.Size([5, 3]), 15)


def test_description_lists_tensors_by_dtype() -> None:
    content = pickle.dumps({torch.bfloat16: [WEIGHT], torch.float32: []})
    seen: set[str] = set()
    ((info,),) = described(content, SHAPES, seen)
    assert (info.name, info.dtype, info.shape) == ("layers.0.weight", "bfloat16", (5, 3))
    assert seen == {"layers.0.weight"}
    assert described(pickle.dumps({}), SHAPES, seen) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "has another form"),
        ({"bfloat16": [WEIGHT]}, "has another form"),
        ({torch.bfloat16: WEIGHT}, "has another form"),
        ({torch.bfloat16: [WEIGHT[:2]]}, "has another form"),
        ({torch.bfloat16: [("layers.0.weight", (5, 3), 15)]}, "has another form"),
        ({torch.bfloat16: [("layers.0.weight", torch.Size([5, 3]), 15.0)]}, "has another form"),
        ({torch.bfloat16: [(b"layers.0.weight", torch.Size([5, 3]), 15)]}, "has another form"),
        (
            {torch.bfloat16: [("layers.0.weight", torch.Size([5, 3]), 14)]},
            "count 14, but its shape has 15 elements",
        ),
        ({torch.bfloat16: [("layers.0.weight", torch.Size([3, 5]), 15)]}, r"\[3, 5\]"),
        ({torch.bfloat16: [("head", torch.Size([5, 3]), 15)]}, "not a tensor of this model"),
        ({torch.bfloat16: [WEIGHT, WEIGHT]}, "occurs twice"),
        ({torch.int8: [WEIGHT]}, r"names 'torch\.int8', which is not allowed"),
    ],
)
def test_false_description_is_rejected(value: Any, message: str) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        described(pickle.dumps(value), SHAPES, set())


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is not a pickle"), (b'{"format": 1}', "is not a pickle"), (b"\x80\x04", "not a whole")],
)
def test_description_must_be_a_pickle(content: bytes, message: str) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        described(content, SHAPES, set())
