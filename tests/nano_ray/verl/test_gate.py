"""The gate without an engine."""

import asyncio
from collections.abc import Awaitable, Callable

from nano_ray.verl.gate import Gate


def run(scene: Callable[[Gate], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await scene(Gate())

    asyncio.run(bounded())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_closed_gate_parks_newcomers_until_it_opens() -> None:
    async def scene(gate: Gate) -> None:
        assert await gate.enter()
        gate.close(reject=False)
        parked = [asyncio.ensure_future(gate.enter()) for _ in range(3)]
        await settle()
        assert not any(each.done() for each in parked)
        gate.close(reject=False)  # a second abort parks these requests too
        await settle()
        assert not any(each.done() for each in parked)
        gate.open()
        assert await asyncio.gather(*parked) == [True] * 3

    run(scene)


def test_gate_that_opens_and_closes_immediately_keeps_the_parked() -> None:
    async def scene(gate: Gate) -> None:
        gate.close(reject=False)
        parked = asyncio.ensure_future(gate.enter())
        await settle()
        gate.open()
        gate.close(reject=False)
        await settle()
        assert not parked.done()
        gate.open()
        assert await parked

    run(scene)


def test_rejecting_gate_rejects_newcomers_and_parked_requests() -> None:
    async def scene(gate: Gate) -> None:
        gate.close(reject=False)
        parked = asyncio.ensure_future(gate.enter())
        await settle()
        gate.close(reject=True)
        assert not await parked
        assert not await gate.enter()
        gate.close(reject=False)
        waiting = asyncio.ensure_future(gate.enter())
        await settle()
        assert not waiting.done()
        gate.open()
        assert await waiting

    run(scene)
