"""Shared parts of a request's samples leave the engine once, for any number of samples, without
loss.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from nano_inference import InferenceEngine
from nano_inference.remote.core import EngineCore
from nano_inference.remote.messages import (
    AT_ONCE,
    AskedParts,
    CommonParts,
    FromEngine,
    Generate,
    Outputs,
    Resume,
    messages_of,
)
from nano_inference.types import Delta, SamplingMask, SamplingParams, TopLogprobs, TrainingSample
from tests.server.engines import config_of

PROMPT = [1, *range(5, 45)]
ASKED = SamplingParams(
    max_tokens=4,
    seed=3,
    ignore_eos=True,
    allowed_token_ids=frozenset(range(3, 299)),
    logit_bias=dict.fromkeys(range(3, 200), 0.5),
    prompt_logprobs=True,
    prompt_top_logprobs=20,
)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[InferenceEngine]:
    threads = torch.get_num_threads()
    with InferenceEngine(config_of(model)) as engine:
        yield engine
    torch.set_num_threads(threads)


def told(engine: InferenceEngine, num_samples: int, message: Any = None) -> list[Outputs]:
    """Return the core's messages for a request."""
    outputs: list[Outputs] = []
    left, over = [num_samples], threading.Event()

    def emit(said: FromEngine) -> None:
        assert isinstance(said, Outputs), said
        outputs.append(said)
        left[0] -= sum(delta.finished is not None for delta in said.deltas)
        if not left[0]:
            over.set()

    core = EngineCore(engine, emit)
    thread = threading.Thread(target=core.run)
    thread.start()
    core.handle(message or Generate(7, PROMPT, ASKED, num_samples))
    assert over.wait(30)
    core.stop()
    thread.join()
    return outputs


def samples_of(outputs: list[Outputs], message: Any) -> list[TrainingSample]:
    """Return the samples after transport over the wire."""
    asked = AskedParts(message)
    decoded = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=Outputs) for each in outputs
    ]
    deltas = [asked.complete(delta) for each in decoded for delta in each.deltas]
    samples = [delta.finished for delta in deltas if delta.finished is not None]
    return sorted(samples, key=lambda sample: sample.sample_index)


def core_of(samples: list[TrainingSample]) -> str:
    return repr(
        [
            replace(sample, request_id=0, group_id=None, cached_tokens=0, kv_versions=())
            for sample in samples
        ]
    )


def test_samples_are_complete_and_shared_parts_are_sent_once(engine: InferenceEngine) -> None:
    sizes = {}
    for count in (1, 6):
        outputs = told(engine, count)
        sizes[count] = sum(len(msgspec.msgpack.encode(each)) for each in outputs)
        samples = samples_of(outputs, Generate(7, PROMPT, ASKED, count))
        assert core_of(samples) == core_of(engine.generate([PROMPT], ASKED, count))
        assert all(each.prompt_logprobs is samples[0].prompt_logprobs for each in samples)
        assert all(each.prompt_top_logprobs is samples[0].prompt_top_logprobs for each in samples)
        assert all(each.sampling_params is ASKED for each in samples)
    everything = len(msgspec.msgpack.encode(ASKED)) + 20 * 9 * len(PROMPT)
    assert sizes[6] - sizes[1] < 5 * 900 < everything


def test_continued_samples_are_complete(engine: InferenceEngine) -> None:
    params = replace(ASKED, max_tokens=2)
    begun = [replace(each, sampling_params=ASKED) for each in engine.generate([PROMPT], params, 3)]
    message = Resume(7, [replace(each, finish_reason="abort") for each in begun])
    samples = samples_of(told(engine, 3, message), message)
    assert core_of(samples) == core_of(engine.generate([PROMPT], ASKED, 3))


def test_changed_numbers_are_sent_again() -> None:
    sample = TrainingSample((1, 2), (3,), (-0.5,), None, 0, "length", prompt_logprobs=(0.0, -1.0))
    sample = replace(sample, sampling_params=SamplingParams(prompt_logprobs=True))
    others = [
        sample,
        replace(sample, prompt_logprobs=(-0.0, -1.0)),
        replace(sample, prompt_logprobs=(-0.0, -1.0)),
    ]
    common, asked = (
        CommonParts(),
        AskedParts(Generate(0, [1, 2], SamplingParams(prompt_logprobs=True))),
    )
    travelling = [common.leave_out(each) for each in others]
    assert [repr(each.prompt_logprobs) for each in travelling] == [
        "(0.0, -1.0)",
        "(-0.0, -1.0)",
        "()",
    ]
    back = [
        asked.complete(Delta(0, 0, (), (), None, finished=each)).finished for each in travelling
    ]
    assert repr(back) == repr(others)


def test_message_size_is_bounded() -> None:
    sample = TrainingSample((1,), (3,) * 10, (-0.5,) * 10, None, 0, "length")
    large = replace(sample, sampling_mask=SamplingMask((0, AT_ONCE), (5,) * AT_ONCE))
    scored = replace(
        sample,
        prompt_logprobs=(-1.0,) * 4096,
        prompt_top_logprobs=(TopLogprobs((1,) * 16, ()),) * 4096,
    )
    each = [
        Delta(0, 0, (), (), None, finished=one)
        for one in (sample, sample, large, large, sample, scored, sample)
    ]
    portions = list(messages_of(each, list(range(7))))
    assert [ids for _, ids in portions] == [[0, 1], [2], [3], [4], [5], [6]]
    assert [delta for deltas, _ in portions for delta in deltas] == each
