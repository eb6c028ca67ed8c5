"""`OpenRequests` counts correctly without scanning other requests."""

import asyncio
from typing import Any
from unittest.mock import MagicMock

from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.remote.client import RequestStream
from nano_inference.remote.open_requests import OpenRequests
from nano_inference.types import SamplingParams
from tests.depth import at_depth
from tests.server.scripted import Script, ScriptedClient

NAMES = [None, "a", "b", "c"]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(NAMES), st.integers(1, 3)),
        st.tuples(st.sampled_from(["remove", "end"]), st.integers(0, 20), st.just(0)),
    ),
    max_size=30,
)


@given(actions=ACTIONS)
@settings(max_examples=at_depth(200), deadline=None)
def test_open_requests_matches_a_scan(actions: list[tuple[str, Any, int]]) -> None:
    requests = OpenRequests()
    left: dict[int, tuple[str | None, int]] = {}
    for index, (action, what, count) in enumerate(actions):
        if action == "add":
            requests.add(index, RequestStream(count, 10, lambda: None, what), count, MagicMock())
            left[index] = what, count
        elif action == "remove":
            removed = requests.remove(what)
            assert (removed is not None) == (left.pop(what, None) is not None)
        elif what in left:
            requests.end_sample(what)
            name, count = left.pop(what)
            if count > 1:
                left[what] = name, count - 1
        assert requests.num_samples == sum(count for _, count in left.values())
        assert set(requests) == set(left)
        for name in ("a", "b", "c", "none"):
            own = [each for each, (given, _) in sorted(left.items()) if given == name]
            assert requests.has_name(name) == bool(own)
            assert requests.named([name, name]) == own
        assert sorted(requests.named(None)) == sorted(left)


class Unscanned(dict[int, Any]):
    """Dict that must not be scanned."""

    def __iter__(self) -> Any:
        raise AssertionError("all requests were looked at")

    values = items = keys = __iter__


def test_request_does_not_look_at_the_others() -> None:
    async def run() -> None:
        client = ScriptedClient(Script(delay=0.0))
        await client.start()
        inner: Any = client._open  # pyright: ignore
        inner._by_id = Unscanned()
        params = SamplingParams(max_tokens=2)
        streams = [
            client.submit([1], params, 2, stream=False, name=f"r{place}") for place in range(5)
        ]
        assert client.num_samples == 10
        assert client.is_live("r3")
        streams[3].close()
        assert not client.is_live("r3")
        assert client.num_samples == 8
        while streams[0].samples_left:
            await streams[0].next()
        await client.abort(["r1"])
        inner._by_id = {}
        await client.close()

    asyncio.run(run())
