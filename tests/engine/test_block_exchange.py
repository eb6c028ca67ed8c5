"""Moving blocks between engines changes no bit, and no block is imported under a wrong name."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.engine.block_exchange import BlockPiece
from nano_inference.errors import InvalidRequest, VersionGone
from nano_inference.kv_cache.block_changes import BlockChanges, short_name
from nano_inference.kv_cache.block_hash import Namespace
from nano_inference.ranks.runner import RankedRunner
from tests.depth import at_depth
from tests.models.tiny import llama_config, llama_weights, tiny_model

Build = Callable[..., InferenceEngine]
SIZE = 4
FAMILIES = ("llama", "gemma3", "mistral", "gemma4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tiny_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def build(models: dict[str, Path]) -> Iterator[Build]:
    built: list[InferenceEngine] = []
    threads = torch.get_num_threads()

    def make(family: str = "llama", **options: Any) -> InferenceEngine:
        defaults = {
            "block_size": SIZE,
            "device": "cpu",
            "num_threads": 1,
            "kv_cache_memory": 2**18,
            "backend": "reference",
        }
        built.append(
            InferenceEngine(EngineConfig(model_path=str(models[family]), **(defaults | options)))
        )
        return built[-1]

    yield make
    for engine in built:
        engine.shutdown()
    torch.set_num_threads(threads)


def params(max_tokens: int = 5, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=3, **options)


def prompt_of(length: int, stem: int = 0) -> list[int]:
    return [7] * stem + [(11 * place + length) % 290 + 3 for place in range(length - stem)]


def bits(sample: TrainingSample) -> tuple[Any, ...]:
    return sample.completion_tokens, sample.logprobs, sample.weight_version


def finished(engine: InferenceEngine) -> TrainingSample:
    """Return the only sample of the engine."""
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    assert len(samples) == 1
    return samples[0]


def move(
    source: InferenceEngine,
    target: InferenceEngine,
    names: tuple[int, ...],
    max_bytes: int = 1 << 20,
) -> int:
    """Move all blocks of a chain that the source has. Return the number of blocks in the target."""
    here = 0
    while (
        here < len(names)
        and (piece := source.blocks.export_blocks(names, here, max_bytes)) is not None
    ):
        before, here = here, target.blocks.import_blocks(piece)
        if here <= before:
            break
    return here


@pytest.mark.thorough(cases=["gemma3-radix-reference"])
@pytest.mark.parametrize(
    ("family", "cache_type", "backend"),
    [
        *((family, kind, "reference") for family in FAMILIES for kind in ("paged", "radix")),
        ("llama", "paged", "auto"),
        ("gemma3", "radix", "auto"),
    ],
)
def test_imported_prompt_continues_bit_identically(
    build: Build, family: str, cache_type: str, backend: str
) -> None:
    source, target, alone = (
        build(family, cache_type=cache_type, backend=backend) for _ in range(3)
    )
    prompt = prompt_of(18)
    first = source.generate([prompt], params(1))[0]
    names = source.blocks.names(prompt)
    assert len(names) == 4
    assert move(source, target, names, max_bytes=2 * source.blocks.format.block_bytes) == 4
    target.loop.check()
    sample = target.generate([prompt], params())[0]
    assert sample.cached_tokens == 16
    assert bits(sample) == bits(alone.generate([prompt], params())[0])
    # Continue from tokens that the first engine sampled, like a decode replica.
    partial = replace(first, finish_reason="abort")
    target.resume_from(partial, max_new_tokens=4)
    assert bits(finished(target)) == bits(sample)
    assert source.blocks.num_exported == target.blocks.num_imported == 4
    for engine in (source, target):
        engine.loop.check()
        assert engine.loop.leaked_blocks() == 0


@settings(
    max_examples=at_depth(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_import_at_any_time_changes_no_bit(build: Build, data: st.DataObject) -> None:
    """Mix requests, exchanges and flushes in any order on caches that are too small for all blocks."""
    family = data.draw(st.sampled_from(FAMILIES))
    kinds = [data.draw(st.sampled_from(["paged", "radix"])) for _ in range(2)]
    engines = [_kept(build, family, kind, place) for place, kind in enumerate(kinds)]
    alone = _kept(build, family, "paged", 2)
    expected: dict[int, TrainingSample] = {}
    prompts: dict[int, list[int]] = {}
    for engine in engines:
        while engine.has_pending():  # left over from an example that Hypothesis gave up halfway
            engine.step()
        engine.flush_cache()
    for _ in range(data.draw(st.integers(2, 8))):
        engine, other = data.draw(st.permutations(engines))
        prompt = prompt_of(data.draw(st.integers(14, 40)), data.draw(st.sampled_from([0, 8, 13])))
        match data.draw(
            st.sampled_from(["request", "request", "request", "move", "move", "flush", "step"])
        ):
            case "request":
                salt = data.draw(st.sampled_from([None, None, "salt"]))
                request_id = engine.add_request(
                    prompt, params(data.draw(st.integers(1, 6)), cache_salt=salt)
                )
                prompts[request_id] = prompt
                expected[(id(engine), request_id)] = alone.generate(  # pyright: ignore[reportArgumentType]
                    [prompt],
                    engine.loop.inbox[-1].sequence.request.params,  # pyright: ignore[reportAttributeAccessIssue]
                )[0]
            case "move":
                known = list(prompts.values()) or [prompt]
                names = other.blocks.names(data.draw(st.sampled_from(known)))
                move(other, engine, names, data.draw(st.sampled_from([1, 4096, 1 << 20])))
            case "flush":
                engine.flush_cache()
            case _:
                pass
        for target in engines:
            _take(target, expected, steps=data.draw(st.integers(0, 3)))
            target.loop.check()
    for engine in engines:
        _take(engine, expected, steps=1000)
        engine.loop.check()
        assert engine.loop.leaked_blocks() == 0
    assert not expected


def _kept(
    build: Build,
    family: str,
    kind: str,
    position: int,
    kept: dict[Any, InferenceEngine] = {},  # noqa: B006
) -> InferenceEngine:
    key = (id(build), family, kind, position)
    if key not in kept:
        small = 26 * SIZE * {"llama": 512, "gemma3": 512, "mistral": 512, "gemma4": 1024}[family]
        kept[key] = build(
            family,
            cache_type=kind,
            kv_cache_memory=2**20 if position == 2 else small,
            max_model_len=64,
        )
    return kept[key]


def _take(engine: InferenceEngine, expected: dict[Any, TrainingSample], steps: int) -> None:
    for _ in range(steps):
        if not engine.has_pending():
            return
        for sample in engine.step():
            assert bits(sample) == bits(expected.pop((id(engine), sample.request_id)))


@pytest.mark.thorough
def test_ranks_export_and_import_their_own_shards(build: Build) -> None:
    engine, alone = build(tensor_parallel=2), build()
    prompt = prompt_of(18)
    want = engine.generate([prompt], params())[0]
    assert bits(want) == bits(alone.generate([prompt], params())[0])
    piece = engine.blocks.export_blocks(engine.blocks.names(prompt))
    assert piece is not None
    assert piece.format.shapes == ((2, 2, 1, SIZE, 16), (2, 2, 1, SIZE, 16))
    assert piece.format.block_bytes == alone.blocks.format.block_bytes
    with pytest.raises(InvalidRequest, match="shapes"):
        alone.blocks.import_blocks(piece)
    engine.flush_cache()
    engine.generate(
        [[place % 290 + 5 for place in range(at, at + 100)] for at in range(0, 500, 100)], params(1)
    )
    engine.flush_cache()  # the old contents of these blocks are overwritten
    assert engine.blocks.import_blocks(piece) == 4
    again = engine.generate([prompt], params())[0]
    assert again.cached_tokens == 16
    assert bits(again) == bits(want)


def test_windows_on_several_ranks_are_rejected_by_name(build: Build) -> None:
    with pytest.raises(
        InvalidRequest,
        match="engines of several ranks cannot exchange blocks of layers with a window",
    ):
        _ = RankedRunner.block_shapes(SimpleNamespace(_units=object()))  # pyright: ignore[reportArgumentType]


def piece_of(engine: InferenceEngine, prompt: list[int]) -> BlockPiece:
    engine.generate([prompt], params(1))
    piece = engine.blocks.export_blocks(engine.blocks.names(prompt))
    assert piece is not None
    return piece


def test_import_rejects_mismatched_blocks_without_side_effects(build: Build) -> None:
    source, target = build(), build(cache_type="radix")
    piece = piece_of(source, prompt_of(17))
    tokens, form, space = piece.token_ids, piece.format, piece.namespace
    target.generate([prompt_of(9)], params(1))
    before = [*target.blocks.report().published], target.cache.num_free_blocks()
    wrong: list[tuple[str, BlockPiece]] = [
        ("numerics", replace(piece, format=replace(form, numerics="other"))),
        ("block_size", replace(piece, format=replace(form, block_size=8))),
        ("dtype", replace(piece, format=replace(form, dtype="bfloat16"))),
        ("shapes", replace(piece, format=replace(form, shapes=((2, 3, 2, 4, 16),)))),
        ("names", replace(piece, names=(*piece.names[:-1], piece.names[-1] ^ 1))),
        ("names", replace(piece, token_ids=(tokens[0] + 1, *tokens[1:]))),
        ("names", replace(piece, namespace=replace(space, salt="another"))),
        ("weight set", replace(piece, namespace=replace(space, weight_set="reference"))),
        ("version", replace(piece, namespace=replace(space, version=1))),
        ("bytes", replace(piece, data=piece.data[:-1])),
        ("bytes", replace(piece, data=piece.data[:, :-1].contiguous())),
        ("bytes", replace(piece, data=piece.data.view(torch.int16))),
        ("token ids", replace(piece, token_ids=tokens[:-1])),
        ("piece", replace(piece, first=4, data=piece.data[:0])),
        ("piece", replace(piece, first=-1)),
        ("piece", replace(piece, names=(), token_ids=(), data=piece.data[:0])),
    ]
    for text, blocks in wrong:
        with pytest.raises(InvalidRequest, match=text):
            target.blocks.import_blocks(blocks)
    target.loop.check()
    target.blocks.report()
    assert ([*target.blocks.report(lost=True).published], target.cache.num_free_blocks()) == before
    assert target.blocks.num_imported == 0
    assert target.blocks.import_blocks(piece) == 4  # weights that computed all of these blocks


def test_blocks_of_old_weights_are_rejected(build: Build) -> None:
    source, target = build(), build()
    piece = piece_of(source, prompt_of(12))
    names = piece.names
    source.update_weights(llama_weights(llama_config(), seed=5), blocking=True)
    assert source.blocks.export_blocks(names) is None, "an old block matched"
    target.update_weights(llama_weights(llama_config(), seed=5), blocking=True)
    with pytest.raises(VersionGone, match="version 0; this engine serves version 1"):
        target.blocks.import_blocks(piece)
    # not yet recomputed under the new weights
    assert move(source, target, source.blocks.names(prompt_of(12))) == 0
    source.generate([prompt_of(12)], params(1))
    assert move(source, target, source.blocks.names(prompt_of(12))) == 3


def test_import_is_partial_after_a_gap_or_in_a_full_cache(build: Build) -> None:
    source, target = build(), build(kv_cache_memory=6 * SIZE * 512, max_model_len=24)
    prompt = prompt_of(40)
    piece = piece_of(source, prompt)
    assert len(piece.names) == 10
    with pytest.raises(InvalidRequest, match="not a valid piece for a cache"):
        target.blocks.import_blocks(piece)
    half = source.blocks.export_blocks(piece.names[:6])
    later = source.blocks.export_blocks(piece.names[:6], first=3)
    assert half is not None and later is not None  # noqa: PT018
    assert target.blocks.import_blocks(later) == 0, "blocks without their prefix"
    request = target.add_request(prompt_of(9), params(6))
    target.step()
    assert target.blocks.import_blocks(half) == 3, "more blocks than were free"
    assert target.blocks.import_blocks(half) == 3
    target.loop.check()
    assert finished(target).request_id == request
    assert target.blocks.import_blocks(later) in (0, 6)
    target.loop.check()


def test_exchange_rejects_sleep_and_disabled_prefix_caching(build: Build) -> None:
    source, target = build(), build(enable_prefix_caching=False)
    piece = piece_of(source, prompt_of(9))
    for call in (
        lambda: target.blocks.import_blocks(piece),
        lambda: target.blocks.export_blocks(piece.names),
    ):
        with pytest.raises(InvalidRequest, match="enable_prefix_caching"):
            call()
    source.sleep()
    for call in (
        lambda: source.blocks.import_blocks(piece),
        lambda: source.blocks.export_blocks(piece.names),
    ):
        with pytest.raises(InvalidRequest, match="asleep"):
            call()
    source.wake()
    assert source.blocks.export_blocks(piece.names) is None
    assert source.blocks.import_blocks(piece) == 2


def test_block_names_cover_only_the_prompt(build: Build) -> None:
    source = build(cache_type="radix")
    piece = piece_of(source, prompt_of(13))
    assert piece.namespace == Namespace("policy", 0)
    assert piece.token_ids == tuple(prompt_of(13)[:12])
    assert source.blocks.export_blocks((1, 2, 3)) is None
    assert source.blocks.export_blocks(()) is None
    assert source.blocks.export_blocks(piece.names[1:]) is None, "a chain without its head"
    assert source.blocks.export_blocks(piece.names, first=3) is None
    assert source.blocks.export_blocks(source.blocks.names(prompt_of(13), salt="x")) is None
    mixed = source.blocks.export_blocks((*piece.names[:2], 17))
    assert mixed is not None
    assert mixed.names == piece.names[:2]


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_cache_reports_list_cached_blocks(build: Build, cache_type: str) -> None:
    engine = build(cache_type=cache_type, kv_cache_memory=12 * SIZE * 512, max_model_len=48)
    known: set[int] = set()
    for round_ in range(12):
        report = engine.blocks.report(lost=round_ == 7)
        assert report.number == round_ + 1
        assert report.whole == (round_ in (0, 7))
        known = (set() if report.whole else known - set(report.dropped)) | set(report.published)
        assert known == set(map(short_name, engine.cache._pool.names))  # pyright: ignore[reportPrivateUsage]
        if round_ == 9:
            engine.flush_cache()
        else:
            engine.generate([prompt_of(10 + 3 * round_)], params(2))


def test_cache_events_are_bounded_and_cancel_out() -> None:
    news = BlockChanges(most=3)
    assert news.take([5]).whole
    for name in (1, 2):
        news.published(name)
    news.dropped(1)
    news.dropped(5)
    news.published(5)
    assert news.take([]) == news.take([]).__class__(2, (2,), ())
    for name in range(10, 14):
        news.published(name)
    report = news.take([2, 10, 11, 12, 13])
    assert report.whole
    assert report.published == (2, 10, 11, 12, 13)
