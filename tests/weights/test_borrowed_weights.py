"""An update applies the tensors that were checked, even if the caller or its file overwrites them
while the update waits.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference import InferenceEngine
from tests.weights.in_process import InProcess
from tests.weights.weight_cases import (
    HEAD,
    NEW,
    NORM,
    OLD,
    PROMPT,
    UP,
    Build,
    assert_holds,
    drain,
    drawn,
)

PATIENCE = 30.0


def overwrite(file: Path) -> None:
    """Overwrite the values of a safetensors file in place."""
    data = np.memmap(file, mode="r+")
    header = int.from_bytes(bytes(data[:8]), "little")
    data[8 + header :] = 0xFF  # NaN in every dtype
    data.flush()


def zero(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor.zero_()


def from_file(folder: Path) -> tuple[Any, Callable[[], None]]:
    file = folder / "model.safetensors"
    save_file(NEW, file)
    return str(file), lambda: overwrite(file)


def mapped(folder: Path) -> tuple[Any, Callable[[], None]]:
    file = folder / "model.safetensors"
    save_file(NEW, file)
    return load_file(file), lambda: overwrite(file)


def owned(folder: Path) -> tuple[Any, Callable[[], None]]:
    tensors = {name: tensor.clone() for name, tensor in NEW.items()}
    return tensors, lambda: zero(tensors)


Source = Callable[[Path], tuple[Any, Callable[[], None]]]


def at_next_step(
    monkeypatch: pytest.MonkeyPatch, engine: InferenceEngine, act: Callable[[], None]
) -> list[bool]:
    """Call `act` before the next step. Return a list that is filled afterwards."""
    step, called = engine.loop.step, list[bool]()

    def first() -> Any:
        monkeypatch.setattr(engine.loop, "step", step)
        act()
        called.append(True)
        return step()

    monkeypatch.setattr(engine.loop, "step", first)
    return called


@pytest.mark.parametrize("source", [from_file, mapped, owned])
def test_waiting_blocking_update_owns_its_tensors(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source
) -> None:
    engine = build()
    weights, spoil = source(tmp_path)
    engine.add_request(PROMPT, drawn())
    engine.step()
    spoilt = at_next_step(monkeypatch, engine, spoil)
    engine.update_weights(weights, blocking=True, kv_policy="wait", check_finite=True)
    assert spoilt
    assert_holds(engine, NEW)


def test_blocking_update_copies_tensors_once_it_must_wait(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's request arrives while the update is staged."""
    engine = build()
    weights, spoil = from_file(tmp_path)
    manager = engine.weight_sync
    stage = manager.stage

    def late(*args: Any, **options: Any) -> Any:
        other = threading.Thread(target=engine.add_request, args=(PROMPT, drawn()))
        other.start()
        other.join(PATIENCE)
        return stage(*args, **options)

    monkeypatch.setattr(manager, "stage", late)
    spoilt = at_next_step(monkeypatch, engine, spoil)
    engine.update_weights(weights, blocking=True, kv_policy="wait")
    assert spoilt
    assert_holds(engine, NEW)


def test_immediate_blocking_update_copies_nothing(build: Build) -> None:
    engine = build()
    assert engine.update_weights(NEW, blocking=True, kv_policy="wait").staged_bytes == 0
    engine.add_request(PROMPT, drawn())
    engine.step()
    assert engine.update_weights(OLD, blocking=True).staged_bytes == 0
    drain(engine)


def test_file_update_is_checked_on_its_copy(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is overwritten between the check of a tensor and its copy."""
    from nano_inference.weights import staging as session

    engine = build()
    weights, spoil = from_file(tmp_path)
    require_finite = session._require_finite

    def spoiling(name: str, *args: Any) -> None:
        require_finite(name, *args)
        if name == HEAD:  # the last tensor
            spoil()

    monkeypatch.setattr(session, "_require_finite", spoiling)
    engine.add_request(PROMPT, drawn())
    engine.step()
    engine.update_weights(weights, kv_policy="wait", check_finite=True)
    drain(engine)
    assert_holds(engine, NEW)


@pytest.mark.parametrize("as_patches", [False, True])
def test_served_tensors_may_be_swapped_through_a_transport(build: Build, as_patches: bool) -> None:
    """`state_dict` returns views: the first tensor is written before the second is read."""
    engine, other = build(backend="reference"), UP.replace("layers.1", "layers.0")
    served = engine.weight_sync.state_dict()
    swapped: Any = {UP: served[other], other: served[UP]}
    if as_patches:
        indices = torch.arange(OLD[UP].numel())
        swapped = [[(name, indices, tensor.reshape(-1)) for name, tensor in swapped.items()]]
    update = engine.receive_weights(InProcess(swapped))
    while not update.wait(0.01):
        engine.step()
    update.result(0)
    assert_holds(engine, OLD | {UP: OLD[other], other: OLD[UP]})


def test_norms_may_be_swapped_through_a_transport(build: Build) -> None:
    """Every backend serves norms in their given form."""
    engine = build()
    name = "model.layers.0.input_layernorm.weight"
    engine.update_weights({NORM: NEW[NORM], name: NEW[name]})
    served = engine.weight_sync.state_dict()
    assert not served[NORM].equal(served[name])
    update = engine.receive_weights(InProcess({NORM: served[name], name: served[NORM]}))
    while not update.wait(0.01):
        engine.step()
    update.result(0)
    assert_holds(engine, OLD | {NORM: NEW[name], name: NEW[NORM]})
