"""Prompts on one replica and decoding on another give the bits of one engine, whoever dies."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.checkpoints.loading import resolve_model
from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.fleet.fleet_client import FleetClient
from nano_inference.remote.client import EngineClient
from nano_inference.remote.directory import names_of
from nano_inference.remote.in_process import InProcessClient
from nano_inference.server.config import ServerConfig
from nano_inference.structured.grammar import Grammar
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import SamplingParams, TrainingSample
from tests.fleet.fleets import fleet, plain, play, told
from tests.models.tiny import tiny_llama
from tests.server.engines import config_of, finished, params_of
from tests.server.scripted import Script
from tests.structured.vocabularies import with_tokenizer

LEAST = 12
PROMPTS = [[3 + (7 * place + each) % 280 for place in range(16 + each)] for each in range(12)]


@asynccontextmanager
async def split(
    model: Path, count: int = 2, prefill: int = 1, **options: Any
) -> AsyncIterator[FleetClient]:
    threads = torch.get_num_threads()
    client = FleetClient(
        lambda _: InProcessClient(replace(config_of(model), **options), 4096),
        count,
        4096,
        prefill_replicas=prefill,
        prefill_least=LEAST,
    )
    await client.start()
    try:
        yield client
    finally:
        await client.close()
        torch.set_num_threads(threads)


def kinds() -> list[tuple[list[int], SamplingParams, int, bool]]:
    more: list[dict[str, Any]] = [
        {},
        {"top_logprobs": 2, "raw_logprobs": True},
        {"presence_penalty": 0.5, "min_p": 0.01},
        {"sampling_mask": True},
        {"prompt_logprobs": True},
        {"temperature": 0.0, "cache_salt": "s"},
        {"repetition_penalty": 1.2, "logit_bias": {5: 2.0}},
        {"max_tokens": 1},
        {"min_tokens": 5, "ignore_eos": False},
    ]
    return [
        (
            prompt,
            replace(params_of(each), **more[each % len(more)]),
            3 if each % 4 == 0 else 1,
            each % 3 > 0,
        )
        for each, prompt in enumerate(PROMPTS)
    ]


async def answers(
    client: EngineClient, wanted: list[int] | None = None
) -> list[list[TrainingSample]]:
    streams = [
        client.submit(prompt, params, count, stream=stream)
        for place, (prompt, params, count, stream) in enumerate(kinds())
        if wanted is None or place in wanted
    ]
    return [await finished(stream) for stream in streams]


def bits(samples: list[list[TrainingSample]]) -> str:
    return repr([[plain(each) for each in some] for some in samples])


def requests_of(client: FleetClient, place: int) -> Any:
    inner = client.supervisor.replicas[str(place)].client
    assert isinstance(inner, InProcessClient)
    assert inner._core is not None
    return inner._core.engine


def test_disaggregated_bits_match_one_engine_with_prompts_once(model: Path) -> None:
    async def test() -> None:
        async with split(model, 1, 0) as client:
            expected = await answers(client)
        async with split(model) as client:
            assert client.prefill is not None
            got = await answers(client)
            assert bits(got) == bits(expected)
            long = sum(params.max_tokens > 1 for _, params, _, _ in kinds())
            assert client.prefill.num_prompts == long
            prompts, decodes = requests_of(client, 0), requests_of(client, 1)
            assert (
                prompts.blocks.num_exported
                == decodes.blocks.num_imported
                == client.transfers.num_blocks
            )
            # The decode replica recomputes scored prompts and the last, partial block of each one
            # (prompt_logprobs). It also computes requests of one token.
            full = sum(len(prompt) // 4 for prompt in PROMPTS)
            assert client.transfers.num_blocks >= full - 12
            assert not client.requests
            assert client.num_samples == 0
            assert [client.router.score(name) for name in client.router.replicas] == [0, 0]
            for engine in (prompts, decodes):
                assert engine.loop.leaked_blocks() == 0
            # Repeat: the decode replica has the prompts now, so nothing is sent twice.
            before = client.transfers.num_blocks
            assert bits(await answers(client)) == bits(expected)
            assert client.transfers.num_blocks == before

    play(test())


def test_grammars_move_with_their_requests(tmp_path: Path) -> None:
    """Draw the grammar's first token on the prefill replica."""
    folder = with_tokenizer(tiny_llama(tmp_path, seed=0))
    grammars = [
        Grammar.regex("[0-9]{3}-[a-f]{2,9}"),
        Grammar.choice(["yes", "no"]),
        replace(Grammar.regex("[0-9]{4}"), after="t", opened_by="a"),
        None,
    ]

    async def made(client: EngineClient) -> str:
        streams = [
            client.submit(prompt, replace(params_of(place, 30), grammar=grammar), 2, stream=True)
            for place, prompt in enumerate(PROMPTS)
            for grammar in grammars
        ]
        return bits([await finished(stream) for stream in streams])

    async def test() -> None:
        async with split(folder, 1, 0) as client:
            expected = await made(client)
        async with split(folder) as client:
            assert await made(client) == expected
            assert client.prefill is not None
            assert client.prefill.num_prompts == len(PROMPTS) * len(grammars)

    play(test())


@pytest.mark.thorough
def test_stop_string_in_the_first_token_ends_the_sample() -> None:
    """Draw the stop string on the prefill replica: the decode replica must not continue."""
    model, roomy = resolve_model("smollm2-135m"), {"kv_cache_memory": 2**24}

    async def test() -> None:
        prompt = load_tokenizer(model).encode("The capital of France is the city of")
        assert len(prompt) < LEAST
        prompt = [prompt[0]] * LEAST + prompt
        params = SamplingParams(max_tokens=6, temperature=0.0, seed=1)
        async with split(model, 1, 0, **roomy) as client:
            (quiet,) = await finished(client.submit(prompt, params, stream=True))
            first = load_tokenizer(model).decode(quiet.completion_tokens[:1])
            stopping = replace(params, stop=(first,))
            expected = [
                await finished(client.submit(prompt, stopping, count, stream=True))
                for count in (1, 2)
            ]
            assert [each.completion_tokens for each in expected[0]] == [quiet.completion_tokens[:1]]
        async with split(model, **roomy) as client:
            for stream in (True, False):
                got = [
                    await finished(client.submit(prompt, stopping, count, stream=stream))
                    for count in (1, 2)
                ]
                assert bits(got) == bits(expected)

    play(test())


def test_blocks_are_recomputed_if_they_cannot_be_transferred(model: Path) -> None:
    async def test() -> None:
        async with split(model, 1, 0) as client:
            expected = await answers(client)
        async with split(model) as client:

            async def fails(*_: Any) -> int:
                raise TimeoutError

            client.transfers._bring = fails  # pyright: ignore[reportAttributeAccessIssue]
            assert bits(await answers(client)) == bits(expected)
            assert client.prefill is not None
            assert client.prefill.num_prompts > 0
            assert client.transfers.num_blocks == 0

    play(test())


def test_engines_without_block_transfer_are_rejected(model: Path) -> None:
    async def test() -> None:
        with pytest.raises(InvalidRequest, match="set enable_prefix_caching=True"):
            async with split(model, enable_prefix_caching=False):
                pass

    play(test())


@pytest.mark.parametrize("victim", [0, 1])
def test_disaggregated_side_continues_if_the_other_dies(model: Path, victim: int) -> None:
    async def test() -> None:
        async with split(model, 1, 0) as client:
            expected = await answers(client)
        async with split(model) as client:
            streams = [
                client.submit(prompt, params, n, stream=s) for prompt, params, n, s in kinds()
            ]
            await streams[1].next() if victim else await asyncio.sleep(0.01)
            client.supervisor.replicas[str(victim)].client.kill()
            got = [await finished(stream) for place, stream in enumerate(streams) if place != 1]
            assert bits(got) == bits([each for place, each in enumerate(expected) if place != 1])
            last = await answers(client, wanted=[0, 2])
            assert bits(last) == bits([expected[0], expected[2]])

    play(test())


def scripted(act: Callable[..., Any]) -> None:
    """Yield a fleet with a prefill replica of scripted engines."""

    async def test() -> None:
        script = Script(list(range(100, 130)), delay=0.001)
        async with fleet(3, script, prefill_replicas=1, prefill_least=2) as made:
            await act(made)
            assert not made.client.requests

    play(test())


PARAMS = SamplingParams(max_tokens=20, seed=1)


def test_request_cancelled_in_transfer_is_dropped() -> None:
    async def act(made: Any) -> None:
        for engine in made.engines:
            engine.returns |= {"count_blocks": 0}
        made.engines[0].fails["export_blocks"] = lambda: stream.close()
        stream = made.client.submit([1] * 40, PARAMS, stream=True)
        await stream.next()
        await asyncio.sleep(0.05)
        assert [len(engine.resumed) for engine in made.engines] == [0, 0, 0]
        assert [made.client.router.score(name) for name in "012"] == [0, 0, 0]

    scripted(act)


def test_request_aborted_in_transfer_arrives_and_ends() -> None:
    async def act(made: Any) -> None:
        held = asyncio.Event()
        for engine in made.engines:
            engine.returns |= {"count_blocks": 0}
        carry = made.client.transfers._bring

        async def slowly(*arguments: Any) -> int:
            held.set()
            await asyncio.sleep(30)
            return await carry(*arguments)

        made.client.transfers._bring = slowly
        stream = made.client.submit([1] * 40, PARAMS, stream=True, name="it")
        await held.wait()
        assert await made.client.abort(["it"]) == 1
        (other,) = [engine for engine in made.engines if engine.resumed]
        assert other._ended == {other.resumed[0].request_id}, (
            "it was told to end where it has landed"
        )
        await _all(stream)

    scripted(act)


def test_chosen_replica_may_be_gone_before_the_blocks_arrive() -> None:
    async def act(made: Any) -> None:
        quiet = told(await _all(made.client.submit([1] * 3, PARAMS, stream=True)))

        async def dies(request: Any, source: Any, target: Any) -> int:
            target.die()
            return 0

        made.client.transfers._bring = dies
        stream = made.client.submit([1] * 40, PARAMS, stream=True)
        assert told(await _all(stream)) == quiet
        assert sum(engine.why_dead is not None for engine in made.engines) == 1

    scripted(act)


async def _all(stream: Any) -> list[Any]:
    deltas: list[Any] = []
    while stream.samples_left:
        deltas += await asyncio.wait_for(stream.next(), 5)
    return deltas


def test_prefix_is_fetched_from_the_replica_that_has_it(model: Path) -> None:
    """Drain the replica that holds the prefix, so that another one gets the next request."""

    async def test() -> None:
        async with split(model, 1, 0) as client:
            expected = await answers(client, wanted=[1, 2])
        threads = torch.get_num_threads()
        config = config_of(model)
        shared = FleetClient(lambda _: InProcessClient(config, 4096), 2, 4096, share_prefixes=True)
        await shared.start()
        try:
            sharing = shared.sharing
            assert sharing is not None
            first = await answers(shared, wanted=[1])
            await sharing.look()
            holder = sharing.directory.longest(names_of(PROMPTS[1], 4, 0))
            assert holder is not None
            assert holder.num_blocks >= len(PROMPTS[1]) // 4
            assert sharing.cost is not None
            sharing.cost.prefill_rate, sharing.cost.latency = 1e3, 0.0  # computing is slow
            shared.drain(holder.replica)
            second = await answers(shared, wanted=[1, 2])
            assert sharing.num_fetches == 1
            assert sharing.cost.prefill_rate != 1e3, "what requests waited was measured"
            assert shared.transfers.num_blocks == (len(PROMPTS[1]) - 1) // 4
            assert bits(first) == bits(expected[:1])
            assert bits(second) == bits(expected)
            assert second[0][0].cached_tokens == (len(PROMPTS[1]) - 1) // 4 * 4
            await sharing.look()
            assert (
                sharing.directory.count(
                    "1" if holder.replica == "0" else "0", names_of(PROMPTS[1], 4, 0)
                )
                > 0
            )
            sharing.cost.prefill_rate = 1e9  # computing is fast
            shared.drain(holder.replica, draining=False)
            await answers(shared, wanted=[1, 2])
            assert sharing.num_fetches == 1
            await shared.remove(holder.replica)
            await sharing.look()
            assert sharing.directory.longest(names_of(PROMPTS[1], 4, 0), []) is None
        finally:
            await shared.close()
            torch.set_num_threads(threads)

    play(test())


@pytest.mark.parametrize(("replicas", "prefill"), [(1, 1), (2, 2), (2, -1), (2, 1.0)])
def test_fleet_needs_a_replica_that_decodes(replicas: int, prefill: Any) -> None:
    with pytest.raises(ConfigError, match="prefill_replicas"):
        ServerConfig(replicas=replicas, prefill_replicas=prefill)
    assert ServerConfig(replicas=2, prefill_replicas=1).prefill_replicas == 1
    with pytest.raises(ConfigError, match="share_prefixes"):
        ServerConfig(share_prefixes=True)
