"""Memory for received weights is reused only after its last holder released it."""

import random
from typing import Any, cast

from torch import Tensor

from nano_inference.arrays import host
from nano_inference.ops.cpu.memory import HUGE_PAGE
from nano_inference.weights.transports.reuse import ReusedMemory


def test_memory_is_reused_once_it_is_released() -> None:
    memory = ReusedMemory()
    first = memory.take(HUGE_PAGE + 5)
    address = first.data_ptr()
    part = cast("Any", first)[8:10].view(host.int16)
    del first
    other = memory.take(HUGE_PAGE + 5)
    assert other.data_ptr() != address, "a view holds it"
    del part
    assert memory.take(HUGE_PAGE).data_ptr() == address
    assert memory.take(3).nbytes == 3


def test_take_picks_the_best_fit_within_bounds() -> None:
    memory = ReusedMemory()
    pieces = {count: memory.take(count * HUGE_PAGE) for count in (6, 2, 3)}
    places = {count: piece.data_ptr() for count, piece in pieces.items()}
    pieces.clear()
    taken = memory.take(2 * HUGE_PAGE)
    assert taken.data_ptr() == places[2]
    small = memory.take(HUGE_PAGE)  # pieces three and six times as large would be a waste
    assert small.data_ptr() not in places.values()
    assert len(memory._free) == 2
    assert memory.take(5 * HUGE_PAGE).data_ptr() == places[6]


def test_piece_in_use_is_not_handed_out_again() -> None:
    rng, memory, held = random.Random(0), ReusedMemory(), list[tuple[Tensor, int]]()
    places: set[int] = set()
    for count in range(300):
        if held and rng.random() < 0.5:
            tensor, value = held.pop(rng.randrange(len(held)))
            assert bool((tensor == value).all())
        tensor = memory.take(HUGE_PAGE + rng.randrange(4) * 4096).fill_(count % 251)
        places.add(tensor.data_ptr())
        held.append((tensor.view(2, -1)[:, 1:], count % 251))
        del tensor
        held = held[-6:]
    assert len(places) < 60, "it is used again"


def test_forgotten_memory_is_not_reused() -> None:
    memory = ReusedMemory()
    tensor = memory.take(HUGE_PAGE)
    memory.forget()
    tensor.fill_(1)
    del tensor
    assert len(memory._free) == 1
    memory.forget()
    assert not memory._free
