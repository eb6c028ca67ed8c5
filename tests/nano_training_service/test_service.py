"""The service's guarantees on order, independence, checkpoints, deadlines and bounds, with a base
model of two matrices.
"""

import asyncio
import gc
import hashlib
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from nano_training_service import checkpoints
from nano_training_service import service as service_module
from nano_training_service.base import Adapter
from nano_training_service.checkpoints import Checkpoints, Run
from nano_training_service.config import TrainServiceConfig
from nano_training_service.messages import AdamParams, CreateSession
from nano_training_service.service import Service
from nano_training_service.sessions import Model
from nano_training_service.trainer import Bounds, Trainer
from tests.nano_training_service.asking import Asker, batch, loss_of, scored
from tests.nano_training_service.bigrams import VOCAB, Bigrams
from tests.nano_training_service.conftest import Services
from tests.server import virtual_time

TOKENS = list(range(1, 9))
WEIGHTS = {"weights": [1.0] * 7}


def sequences(seed: int, count: int = 3) -> list[tuple[list[int], dict[str, list[float]]]]:
    """Return random sequences with weights."""
    chance = np.random.default_rng(seed)
    return [
        (chance.integers(0, VOCAB, 8).tolist(), {"weights": chance.random(7).tolist()})
        for _ in range(count)
    ]


def adapter(folder: Path, path: str) -> bytes:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return (folder / "runs" / run / kind / name / "adapter_model.safetensors").read_bytes()


def train(url: str, number: int, steps: int = 5) -> str:
    """Train as one client and return the path of its checkpoint."""
    asker = Asker(url)
    asker.create(seed=number)
    for step in range(steps):
        asker.send_batch(sequences(100 * number + step))
        asker.send_batch(sequences(1000 * number + step, 1))
        assert asker.step()["metrics"]["grad_norm"] > 0
        asker.sample(asker.sampler(step), TOKENS)
    return asker.save("end")["path"]


@pytest.mark.thorough
def test_concurrent_clients_get_the_results_of_single_ones(service: Services) -> None:
    def digests(*numbers: int) -> list[str]:
        """Return the digests of clients that run concurrently."""
        paths: dict[int, str] = {}
        with service() as url:
            threads = [
                threading.Thread(target=lambda n=n: paths.update({n: train(url, n)}))
                for n in numbers
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return [hashlib.sha256(adapter(service.folder, paths[n])).hexdigest() for n in numbers]

    together = digests(1, 2)
    assert together == digests(1) + digests(2)
    assert together[0] != together[1]


def test_requests_wait_for_their_turn_and_come_twice_in_vain(service: Services) -> None:
    results = []
    for order in ((1, 2, 3), (3, 1, 2)):
        with service() as url:
            asker = Asker(url)
            asker.create()
            bodies = {
                1: batch(asker.model, 1, sequences(1)),
                2: batch(asker.model, 2, sequences(2)),
            }
            ids = {}
            for seq in order:
                if seq == 3:
                    asked = {"model_id": asker.model, "seq_id": 3}
                    asked |= {"adam_params": {"learning_rate": 0.1}}
                    ids[3] = asker.post("/optim_step", **asked)["request_id"]
                    assert asker.post("/optim_step", **asked)["request_id"] == ids[3]
                else:
                    ids[seq] = asker.send_bytes(bodies[seq])
                    assert asker.send_bytes(bodies[seq]) == ids[seq]
            assert asker.result(ids[3])["metrics"]["grad_norm"] > 0
            assert asker.send_bytes(bodies[1]) == ids[1]
            asker.seq = 3
            results.append(adapter(service.folder, asker.save("end")["path"]))
    assert results[0] == results[1]


def test_gradients_add_up_over_batches(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        norms = []
        for number, parts in enumerate(([4], [2, 2])):
            asker.create(number)
            left = sequences(3, 4)
            for size in parts:
                asker.send_batch(left[:size])
                left = left[size:]
            norms.append(asker.step()["metrics"]["grad_norm"])
            assert "no gradients" in asker.step()["error"]  # the step consumed the gradients
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_resumed_optimizer_continues_bit_for_bit(service: Services) -> None:
    def go_on(asker: Asker) -> bytes:
        for step in (7, 8):
            asker.send_batch(sequences(step))
            asker.step(weight_decay=0.1)
        return adapter(service.folder, asker.save("end")["path"])

    with service() as url:
        asker = Asker(url)
        asker.create()
        for step in range(3):
            asker.send_batch(sequences(step))
            asker.step()
        half = asker.save("half")["path"]
        whole = go_on(asker)
    with service() as url:  # a second service
        results = {}
        for optimizer in (True, False):
            asker = Asker(url)
            about = {"session_id": asker.session, "model_seq_id": 0, "path": half}
            asked = asker.post("/load_weights", **about, optimizer=optimizer)
            asker.model = asker.result(asked["request_id"])["model_id"]
            results[optimizer] = go_on(asker)
    assert results[True] == whole
    assert results[False] != whole


def test_loading_into_a_model_and_what_does_not_fit(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        asker.create()
        asker.send_batch(sequences(1))
        asker.step()
        path = asker.save("one")["path"]
        first = adapter(service.folder, path)
        asker.send_batch(sequences(2))
        asker.step()
        load = {"path": path, "optimizer": True}
        asker.send_batch(sequences(3))  # loading drops these gradients
        assert asker.result(asker.send("/load_weights", **load))["path"] == path
        assert adapter(service.folder, asker.save("two")["path"]) == first
        assert "no gradients" in asker.step()["error"]
        asker.create(1, rank=2)
        assert "rank=4" in asker.result(asker.send("/load_weights", **load))["error"]
        sampled = asker.result(asker.send("/save_weights_for_sampler", path="s"))["path"]
        asked = {"path": sampled, "optimizer": True}
        assert "no optimizer" in asker.result(asker.send("/load_weights", **asked))["error"]


def test_batch_that_fails_leaves_nothing_half_applied(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        asker.create()
        before = adapter(service.folder, asker.save("before")["path"])
        good = asker.send_batch(sequences(1))
        bad = asker.send_batch([(TOKENS, {"weights": [1.0] * 6})])
        refused = asker.step()
        assert isinstance(asker.result(good), bytes)
        assert asker.result(bad)["category"] == "user"
        assert "weights must be finite numbers of shape [7]" in asker.result(bad)["error"]
        assert "weights must be finite" in refused["error"]
        assert adapter(service.folder, asker.save("after")["path"]) == before
        assert "no gradients" in asker.step()["error"]  # the valid batch is dropped too
        asker.send_batch([(TOKENS, {"weights": [1.0] * 6})])
        asker.send_batch(sequences(1))
        assert "weights must be finite" in asker.step()["error"]
        assert "no gradients" in asker.step()["error"]  # the next batch is dropped too
        asker.send_batch(sequences(1))
        assert asker.step()["metrics"]["grad_norm"] > 0
        # a failed forward-only batch affects no other
        asker.send_batch(sequences(1))
        asker.result(asker.send_batch([(TOKENS, {"x": [1.0] * 7})], forward_only=True))
        assert asker.step()["metrics"]["grad_norm"] > 0


def test_padded_targets_train_to_the_same_bits(service: Services) -> None:
    """Pad like the cookbook's rl_loop: zeros before the sample, with advantages of 0."""
    prompt, sample = [10, 20, 30, 31], [5, 6, 7]
    tokens, pad = prompt + sample, [0.0] * (len(prompt) - 1)
    rest = {"logprobs": [*pad, -3.0, -3.5, -3.0], "advantages": [*pad, 1.0, 1.0, -0.5]}
    padded = {"target_tokens": [0] * len(pad) + sample, **rest}
    found, logprobs = [], []
    with service() as url:
        for data in ([(tokens, rest)], [(tokens[:-1], padded)]):
            asker = Asker(url)
            asker.create()
            asker.send_batch(data, "importance_sampling")
            asker.step()
            output = asker.result(asker.send_batch(data, "importance_sampling"))
            logprobs.append(np.frombuffer(scored(output), "<f4"))
            found.append(adapter(service.folder, asker.save("end")["path"]))
            zeros = [([token, 0], {}) for token in prompt[:-1]]
            zeros = scored(asker.result(asker.send_batch(zeros, forward_only=True)))
        assert found[0] == found[1]
        own, given = logprobs
        assert own[len(pad) :].tolist() == given[len(pad) :].tolist()
        assert given[: len(pad)].tobytes() == zeros


def test_targets_of_a_token_sum_their_columns(service: Services) -> None:
    columns = np.array([[1, 2, 3], [4, 4, 9], [0, 5, 31]])
    weights = np.array([[0.5, 0.25, 0.0], [1.0, -1.0, 0.5], [0.0, 0.0, 2.0]])
    data = [([7, 8, 9], {"target_tokens": columns, "weights": weights})]
    single = [
        ([7, 8, 9], {"target_tokens": columns[:, at], "weights": weights[:, at]}) for at in range(3)
    ]
    with service() as url:
        asker = Asker(url)
        asker.create()
        both = asker.result(asker.send_batch([*data, *single]))
        norm = asker.step(0.0)["metrics"]["grad_norm"]
        logprobs = np.frombuffer(scored(both), "<f4")
        assert logprobs[:9].reshape(3, 3).T.flatten().tolist() == logprobs[9:].tolist()
        whole = asker.result(asker.send_batch(data))
        assert loss_of(whole) == pytest.approx(float(-(weights * logprobs[:9].reshape(3, 3)).sum()))
        assert loss_of(both) == pytest.approx(2 * loss_of(whole))
        assert asker.step(0.0)["metrics"]["grad_norm"] == pytest.approx(norm / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("data", "loss", "words"),
    [
        ([], "cross_entropy", "batch is empty"),
        ([(TOKENS, {"x": [1.0] * 7})], "cross_entropy", "the unknown input 'x'"),
        (
            [(TOKENS, {"clip_low_threshold": [1.0] * 7})],
            "dro",
            "the unknown input 'clip_low_threshold'",
        ),
        ([(TOKENS, {"advantages": [1.0] * 7})], "ppo", "lacks the input 'logprobs'"),
        ([(TOKENS, {"weights": [float("nan")] * 7})], "cross_entropy", "finite numbers"),
        ([(TOKENS, {"target_tokens": [9] * 7})], "cross_entropy", "8 input tokens"),
        ([([1] * 60, {"target_tokens": [[3] * 4] * 60})], "cross_entropy", "max_request_tokens"),
        ([([1, 2, VOCAB], {})], "cross_entropy", "outside \\[0, 32\\)"),
        ([([1], {})], "cross_entropy", "at least one"),
        ([([1] * 65, {})], "cross_entropy", "exceeds max_model_len=64"),
        ([([1] * 60, {})] * 4, "cross_entropy", "max_request_tokens"),
        ([(TOKENS, WEIGHTS)], "stable_reinforce", "got 'stable_reinforce'"),
    ],
)
def test_batches_that_are_refused_by_name(
    service: Services, data: Any, loss: str, words: str
) -> None:
    with service(max_request_tokens=200) as url:
        asker = Asker(url)
        asker.create()
        reply = asker.result(asker.send_batch(data, loss))
        assert reply["category"] == "user"
        assert re.search(words, reply["error"]), reply["error"]


def test_steps_that_are_refused(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        asker.create()
        assert "no gradients" in asker.step()["error"]
        asker.send_batch(sequences(1))
        assert "beta1" in asker.step(beta1=2.0)["error"]
        dimuon = asker.send("/optim_step", optimizer_params={"type": "dimuon"})
        assert "only AdamW" in asker.result(dimuon)["error"]
        huge = asker.send_batch([(TOKENS, {"weights": [3e38] * 7})])
        assert isinstance(asker.result(huge), bytes)
        assert "not finite" in asker.step()["error"]
        asker.send_batch(sequences(1))
        assert asker.step(grad_clip_norm=0.5)["metrics"]["grad_norm"] > 0


def test_models_that_are_refused(service: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(max_models=2, max_rank=8) as url:
        asker = Asker(url)
        for number, (options, words) in enumerate(
            [
                ({"base_model": "other"}, "base_model must be 'bigrams'; got 'other'"),
                ({"rank": 9}, "max_rank"),
                ({"rank": 0}, "between 1 and 8"),
                ({"seed": -1}, "seed=-1"),
                ({"train_attn": False, "train_mlp": False, "train_unembed": False}, "nothing"),
                ({"seed": 13}, "seed 13 cannot be made"),
            ]
        ):
            reply = asker.create(number, **options)
            assert words in reply["error"]
            assert reply["category"] == "user"
        about = {"session_id": asker.session, "base_model": "bigrams"}
        full = asker.post("/create_model", **about, model_seq_id=20)
        assert "only LoRA adapters" in asker.result(full["request_id"])["error"]
        other = {"type": "dimuon", "version": 1}
        asked = asker.post(
            "/create_model",
            **about,
            model_seq_id=21,
            lora_config={"rank": 1},
            optimizer_config=other,
        )
        assert "dimuon" in asker.result(asked["request_id"])["error"]
        asker.create(30)
        asker.create(31)
        assert "of them belong to clients" not in asker.create(32)["error"]
        monkeypatch.setattr(service_module, "SILENT", -1.0)
        error = asker.create(33)["error"]
        for words in (
            "2 models are in training, and the limit is 2 (--max-models)",
            "2 of them belong to clients that have sent nothing",
            "300 seconds after the last heartbeat (--session-timeout)",
            "Close a client that you do not need, wait, or start the service with a larger",
        ):
            assert words in error
        asker.post(f"/sessions/{asker.session}/finish", reason={"type": "success"})
        create_soon(url)


def create_soon(url: str, seconds: float = 60.0) -> None:
    """Create a model once the training thread has freed the place of an expired session."""
    asker, deadline, number = Asker(url), time.monotonic() + seconds, 0
    while "model_id" not in (reply := asker.create(number)):
        assert "--max-models" in reply["error"]
        assert time.monotonic() < deadline, "the place is not given back"
        number += 1
        time.sleep(0.05)


def test_model_that_cannot_be_recorded_fails_promptly(
    service: Services,
) -> None:
    with service(max_pending=1) as url:
        asker = Asker(url)
        reply = asker.create(10**250)  # longer than any folder name may be
        assert reply["category"] == "server"
        assert "model_id" in asker.create(1)


def refused(asked: Callable[[], object], seconds: float = 60.0) -> httpx.HTTPStatusError:
    """Repeat a request until it is rejected, and return the error."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            asked()
        except httpx.HTTPStatusError as problem:
            return problem
        assert time.monotonic() < deadline, "it is not refused"
        time.sleep(0.05)


@pytest.mark.thorough
def test_gap_in_the_order_ends_by_a_deadline(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        asker.create()
        asker.seq = 1
        with service.in_haste():
            late = asker.send_batch(sequences(1))
        found = asker.result(late)
        assert "the preceding request, 1, did not arrive" in found["error"]
        assert found["category"] == "server"
        asker.seq = 0
        assert isinstance(asker.result(asker.send_batch(sequences(1))), bytes)
        asker.seq = 2  # this step includes the late batch
        assert "did not arrive" in asker.step()["error"]


def test_gap_that_is_closed_in_time_ends_nothing(tmp_path: Path) -> None:
    """Close the gap: the deadline no longer applies once the preceding request arrives."""
    gate = threading.Event()

    async def story() -> bool:
        config = TrainServiceConfig(request_timeout=10.0, state_dir=str(tmp_path))
        made = Service(config, Bigrams(), Checkpoints(tmp_path))
        session = made.create_session(CreateSession())
        run = Run("run", "bigrams", 4, 1, True, True, True, None, 1.0, 1.0)
        model = Model(run, session)
        try:
            second = made._in_order(model, 2, dict)
            await asyncio.sleep(6)
            made._in_order(model, 1, lambda: {"type": gate.wait(60)})
            await asyncio.sleep(6)
            return second.result is None
        finally:
            gate.set()
            await made.close()

    assert virtual_time.run(story())


@pytest.mark.thorough
def test_request_queued_for_the_thread_ends_by_a_deadline(service: Services) -> None:
    base = Bigrams()
    with service(base) as url:
        asker = Asker(url)
        asker.create()
        sampler = asker.sampler()
        base.delay = 4.0
        running = asker.send_batch(sequences(1))
        with service.in_haste():
            waiting = asker.send_batch(sequences(2))
            assert "did not start it within 1 seconds" in asker.result(waiting)["error"]
            assert "deadline" in asker.sample(sampler, TOKENS)["error"]
        assert isinstance(asker.result(running), bytes)
        assert "did not start it" in asker.step()["error"]


def test_step_that_was_not_done_in_time_leaves_no_gradients(service: Services) -> None:
    base = Bigrams()
    with service(base, request_timeout=2.0) as url:
        alone, asker = Asker(url), Asker(url)
        alone.create()
        alone.send_batch(sequences(2))
        expected = alone.step()
        asker.create()
        base.delay = 4.0
        running = asker.send_batch(sequences(1))
        assert "did not start it within 2 seconds" in asker.step()["error"]
        assert isinstance(asker.result(running), bytes)
        base.delay = 0.0
        asker.send_batch(sequences(2))
        assert asker.step() == expected


def test_model_that_times_out_frees_its_slot(service: Services) -> None:
    base = Bigrams()
    with service(base, max_models=2) as url:
        asker = Asker(url)
        asker.create(1)
        base.delay = 4.0
        running = asker.send_batch(sequences(1))
        with service.in_haste():
            assert "did not start it" in Asker(url).create()["error"]
        assert isinstance(asker.result(running), bytes)
        # The training thread does this after it removes the expired model.
        assert "metrics" in asker.step()
        assert "model_id" in asker.create(2)


@pytest.mark.thorough
def test_results_expire_and_pending_requests_are_bounded(service: Services) -> None:
    base = Bigrams()
    with service(base, max_pending=2, result_timeout=3.0) as url:
        asker = Asker(url)
        asker.create()
        done = asker.send_batch(sequences(1))
        asker.result(done)
        base.delay = 3.0
        asker.send_batch(sequences(1))
        asker.send_batch(sequences(1))
        refusal = refused(lambda: asker.send_batch(sequences(1)), 0.1)
        assert "max_pending" in str(refusal)
        assert refusal.response.status_code == 429
        refusal = refused(lambda: asker.result(done))
        assert "result_timeout" in str(refusal)
        assert refusal.response.status_code == 410
        refused(lambda: asker.result("another"), 0.1)


@pytest.mark.thorough
def test_session_without_heartbeats_frees_its_resources(service: Services) -> None:
    base = Bigrams()
    with service(base, session_timeout=6.0, max_models=1) as url:
        alive, dead = Asker(url), Asker(url)
        dead.create()
        sampler = dead.sampler()
        base.delay = 0.2
        running = dead.send_batch(sequences(1))
        waiting = dead.send_bytes(batch(dead.model, dead.seq + 5, sequences(1)))
        for _ in range(600):
            alive.post("/session_heartbeat", session_id=alive.session)
            time.sleep(0.1)
            gc.collect()
            if not base.policies:
                break
        assert not base.policies
        assert isinstance(dead.result(running), bytes)  # it completed
        assert "no heartbeat" in dead.result(waiting)["error"]
        refused(lambda: dead.post("/session_heartbeat", session_id=dead.session), 0.1)
        refused(lambda: dead.send_batch(sequences(1)), 0.1)
        refused(lambda: dead.sample(sampler, TOKENS), 0.1)
        create_soon(url)
        assert not list(service.folder.glob("runs/*/snapshots"))


def test_client_that_dies_in_a_request_changes_nothing_of_others(service: Services) -> None:
    base = Bigrams()
    with service(base) as url:
        asker = Asker(url)
        asker.create()
        whole = batch(asker.model, 1, sequences(1))
        with pytest.raises(httpx.TransportError):
            asker.http.post("/forward_backward", content=_dying(whole))
        assert isinstance(asker.result(asker.send_bytes(whole)), bytes)
        asker.seq = 1
        norm = asker.step()["metrics"]["grad_norm"]
        asker.create(1)
        asker.send_batch(sequences(1))
        assert asker.step()["metrics"]["grad_norm"] == norm


def _dying(body: bytes) -> Any:
    yield body[: len(body) // 2]
    raise httpx.WriteError("gone")


def test_samplers_share_few_slots_and_see_their_own_weights(service: Services) -> None:
    base = Bigrams(most=2)
    with service(base, max_samplers=2) as url:
        asker = Asker(url)
        asker.create()
        samplers, expected = [], []
        for number in range(4):
            samplers.append(asker.sampler(number))
            expected.append(asker.sample(samplers[-1], TOKENS, 0))
            asker.send_batch(sequences(number))
            asker.step(1.0)
        assert len({*map(bytes, expected)}) == 4
        again = [asker.sample(each, TOKENS, 1) for each in samplers]
        assert again == expected
        assert len(base.adapters) == 2

        base.delay = 0.05
        results: dict[int, Any] = {}

        def ask(number: int) -> None:
            results[number] = asker.sample(samplers[number % 4], TOKENS, 2 + number)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [results[number] for number in range(12)] == expected * 3


def test_clients_sample_from_their_own_weights(service: Services) -> None:
    with service() as url:
        results = []
        for number in (1, 2):
            asker = Asker(url)
            asker.create()
            asker.send_batch(sequences(number))
            asker.step(1.0)
            results.append((asker, asker.sampler(0)))
        drawn = [asker.sample(sampler, TOKENS, 0) for asker, sampler in results]
        assert drawn[0] != drawn[1]


def test_snapshots_are_bounded_and_inflight_ones_follow(service: Services) -> None:
    with service(max_snapshots=2) as url:
        asker = Asker(url)
        asker.create()
        old = asker.sampler(0)
        follows = asker.sampler(1, kind="inflight")
        first = asker.sample(follows, TOKENS, 0)
        asker.send_batch(sequences(1))
        asker.step(1.0)
        newer = asker.sampler(2, kind="inflight")
        assert asker.sample(follows, TOKENS, 1) == asker.sample(newer, TOKENS, 0) != first
        assert "max_snapshots" in asker.sample(old, TOKENS, 0)["error"]
        assert asker.get(f"/samplers/{newer}") == {
            "sampler_id": newer,
            "base_model": "bigrams",
            "model_path": None,
        }


def test_snapshots_of_inflight_samplers_outlive_others(service: Services) -> None:
    with service(max_snapshots=1) as url:
        asker = Asker(url)
        asker.create()
        follows = asker.sampler(0, kind="inflight")
        plain = [asker.sampler(number) for number in (1, 2)]
        drawn = [asker.sample(sampler, TOKENS, 0) for sampler in (follows, plain[1])]
        assert drawn[0] == drawn[1]
        assert isinstance(drawn[0], bytes)
        assert "max_snapshots" in asker.sample(plain[0], TOKENS, 0)["error"]


def test_named_sampler_weights_and_the_base_model(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        asker.create()
        asker.send_batch(sequences(1))
        asker.step(1.0)
        path = asker.result(asker.send("/save_weights_for_sampler", path="s"))["path"]
        taken = asker.result(asker.send("/save_weights_for_sampler", path="s"))
        assert "already exists" in taken["error"]
        about = {"session_id": asker.session}
        made = [
            asker.post(
                "/create_sampling_session", **about, sampling_session_seq_id=number, **names
            )["sampling_session_id"]
            for number, names in ((0, {"model_path": path}), (1, {"base_model": "bigrams"}))
        ]
        named, base = (asker.sample(each, TOKENS) for each in made)
        assert named == asker.sample(asker.sampler(2), TOKENS) != base
        assert asker.post("/join_sampling_session", sampling_session_id=made[0]) == {
            "type": "join_sampling_session",
            "client_counter": 1,
        }
        for names, status in (
            ({"model_path": "tinker://no/sampler_weights/x"}, 404),
            ({"model_path": "tinker://../weights/x"}, 404),
            ({"model_path": "x"}, 400),
            ({"base_model": "other"}, 400),
            ({}, 400),
        ):
            with pytest.raises(httpx.HTTPStatusError) as refusal:
                asker.post("/create_sampling_session", **about, sampling_session_seq_id=9, **names)
            assert refusal.value.response.status_code == status


def test_overwritten_weights_are_sampled_in_their_new_state(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        asker.create()

        def drawn(number: int, path: str) -> Any:
            asked = {"session_id": asker.session, "model_path": path}
            made = asker.post("/create_sampling_session", **asked, sampling_session_seq_id=number)
            return asker.sample(made["sampling_session_id"], TOKENS)

        first = drawn(0, asker.save("a")["path"])
        asker.send_batch(sequences(1))
        asker.step(1.0)
        path = asker.save("a", overwrite=True)["path"]
        assert drawn(1, path) == asker.sample(asker.sampler(2), TOKENS) != first


def test_samples_without_a_number_are_distinguished(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        about = {"session_id": asker.session, "sampling_session_seq_id": 0}
        made = asker.post("/create_sampling_session", **about, base_model="bigrams")
        ids = {
            asker.post(
                "/asample",
                sampling_session_id=made["sampling_session_id"],
                prompt={"chunks": [{"tokens": prompt}]},
                sampling_params={"max_tokens": 2},
            )["request_id"]
            for prompt in ([1, 2], [3, 4])
        }
        assert len(ids) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n"),
        ({"new_field": 3}, "new_field"),
        ({"prompt": {"chunks": []}}, "prompt is empty"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "'image'"),
        (
            {"prompt": {"chunks": [{"tokens": [{"role": "user", "content": "a"}]}]}},
            "not token ids",
        ),
        ({"prompt": {"chunks": [{"tokens": [1.5]}]}}, "not token ids"),
        ({"num_samples": 1000}, "max_request_tokens"),
        ({"num_samples": 2**62}, "max_request_tokens"),
        ({"sampling_params": {"top_p": 2.0}}, "top_p=2.0"),
        ({"sampling_params": {"seed": -1}}, "seed=-1"),
    ],
)
def test_samples_that_are_refused_by_name(
    service: Services, change: dict[str, Any], words: str
) -> None:
    with service(max_request_tokens=2000) as url:
        asker = Asker(url)
        about = {"session_id": asker.session, "sampling_session_seq_id": 0}
        made = asker.post("/create_sampling_session", **about, base_model="bigrams")
        good: dict[str, Any] = {
            "sampling_session_id": made["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": TOKENS}]},
            "sampling_params": {"max_tokens": 2},
        }
        with pytest.raises(httpx.HTTPStatusError, match=words) as refusal:
            asker.post("/asample", **{**good, **change})
        assert refusal.value.response.status_code == 400
        assert isinstance(asker.result(asker.post("/asample", **good)["request_id"]), bytes)


def test_sample_can_be_cancelled(service: Services) -> None:
    base = Bigrams()
    with service(base) as url:
        asker = Asker(url)
        base.delay = 20.0
        asked = asker.post(
            "/asample",
            base_model="bigrams",
            prompt={"chunks": [{"tokens": TOKENS}]},
            sampling_params={"max_tokens": 2},
        )
        asker.post("/cancel_future", request_id=asked["request_id"])
        assert "cancelled" in asker.result(asked["request_id"])["error"]


@pytest.mark.thorough
def test_checkpoints_are_on_record(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        asker.create(train_mlp=False)
        path = asker.save("a", ttl_seconds=3600, user_metadata={"step": "1"})["path"]
        assert "already exists" in asker.save("a")["error"]
        assert asker.save("a", overwrite=True, ttl_seconds=3600)["path"] == path
        assert "cannot name a checkpoint" in asker.save("../a")["error"]
        other = asker.save("b")["path"]
    with service() as url:
        later = Asker(url)
        assert later.post("/weights_info", tinker_path=path) == {
            "base_model": "bigrams",
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": 4,
            "train_unembed": True,
            "train_mlp": False,
            "train_attn": True,
        }
        run = asker.model
        listed = later.get(f"/training_runs/{run}/checkpoints")["checkpoints"]
        assert [each["tinker_path"] for each in listed] == [other, path]
        assert listed[0]["expires_at"] is None
        assert listed[1]["expires_at"] is not None
        assert later.get("/training_runs")["training_runs"][0]["training_run_id"] == run
        assert later.get("/checkpoints?limit=1")["cursor"]["total_count"] == 2
        ids = [each["checkpoint_id"] for each in listed]
        place = f"/training_runs/{run}/checkpoints"
        later.http.put(f"{place}/{ids[0]}/ttl", json={"ttl_seconds": 1})
        later.http.delete(f"{place}/{ids[1]}")
        time.sleep(1.1)
        for gone in (path, other):
            with pytest.raises(httpx.HTTPStatusError):
                later.post("/weights_info", tinker_path=gone)


def test_unlistable_lifetimes_and_names_are_rejected(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        run = asker.create()["model_id"]
        refusal = refused(lambda: asker.save("a", ttl_seconds=10**12), 0.1)
        assert "ttl_seconds" in str(refusal)
        asker.seq -= 1
        asker.save("a", ttl_seconds=10**10)
        path = f"/training_runs/{run}/checkpoints/weights/a/ttl"
        for body in (b"[]", b"{", b'{"ttl_seconds": 0}', b'{"ttl_seconds": 1000000000000}'):
            assert asker.http.put(path, content=body).status_code == 400, body
        assert asker.get("/checkpoints")["checkpoints"][0]["expires_at"].startswith("23")
        about = b'{"session_id": "%b", "model_seq_id": 1, "base_model": "bigrams", ' % (
            asker.session.encode()
        )
        for half in (b"\\ud83d", b"\xed\xa0\xbd"):
            body = about + b'"lora_config": {"rank": 1}, "user_metadata": {"a": "%b"}}' % half
            assert asker.http.post("/create_model", content=body).status_code == 400, body
        whole = about + b'"lora_config": {"rank": 1}, "user_metadata": {"a": "\\ud83d\\ude00"}}'
        asker.result(asker.http.post("/create_model", content=whole).json()["request_id"])
        assert asker.get("/training_runs")["training_runs"][0]["user_metadata"] == {
            "a": "\U0001f600"
        }


def test_publishing_is_not_a_route_and_deletes_nothing(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        run = asker.create()["model_id"]
        path = asker.save("a")["path"]
        place = f"/training_runs/{run}/checkpoints/weights/a"
        for method in ("POST", "PUT", "DELETE"):
            answer = asker.http.request(method, f"{place}/publish")
            assert answer.status_code in (404, 405)
            assert "no such route" in answer.text
        assert asker.post("/weights_info", tinker_path=path)["lora_rank"] == 4
        assert asker.http.delete(place).status_code == 204


def test_checkpoint_may_go_while_others_are_listed(
    service: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service() as url:
        asker = Asker(url)
        asker.create()
        for name in ("a", "b"):
            asker.save(name)
        read = checkpoints.read_json

        def read_late(path: Path) -> dict[str, Any]:
            if path.parent.name == "a":
                shutil.rmtree(path.parent)
            return read(path)

        monkeypatch.setattr(checkpoints, "read_json", read_late)
        listed = asker.get("/checkpoints")["checkpoints"]
        assert [each["checkpoint_id"] for each in listed] == ["weights/b"]


def test_sessions_end_even_if_the_disk_fails(
    service: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def fail(_: Checkpoints) -> None:
        looks.append(time.monotonic())
        raise OSError("the disk is gone")

    monkeypatch.setattr(Checkpoints, "sweep", fail)
    with service(session_timeout=1.0) as url:
        asker, began = Asker(url), time.monotonic()
        while sum(each - began > 1.0 for each in looks) < 2:  # the second checked sessions too
            assert time.monotonic() - began < 60.0, "nobody looks"
            time.sleep(0.05)
        refused(lambda: asker.post("/session_heartbeat", session_id=asker.session), 0.1)


@pytest.mark.thorough
def test_checkpoint_storage_is_bounded(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        asker.create(rank=64)
        asker.result(asker.send_batch(sequences(1)))
        asker.step()
        asker.save("old")
    size = sum(file.stat().st_size for file in service.folder.glob("runs/*/weights/old/*"))
    bound = 10_000 + 2 * size  # the earlier service's checkpoint, one more, and room to save
    with service(max_checkpoint_bytes=bound) as url:
        asker = Asker(url)
        run = asker.create(rank=64)["model_id"]
        asker.result(asker.send_batch(sequences(1)))
        asker.step()
        assert "path" in asker.save("a")
        before = sorted(service.folder.rglob("*"))
        for ask in ("/save_weights", "/save_weights_for_sampler", "/save_weights_external"):
            refused = asker.result(asker.send(ask, path="b"))
            for words in ("max_checkpoint_bytes", f"{bound:,}", "Delete", "ttl_seconds"):
                assert words in refused["error"], ask
            assert refused["category"] == "user"
        assert sorted(service.folder.rglob("*")) == before
        assert "path" in asker.save("a", overwrite=True)  # overwriting needs no more room
        asker.sampler()  # unnamed checkpoints do not count
        asker.result(asker.send_batch(sequences(1)))
        assert "metrics" in asker.step()  # training continues
        asker.http.delete(f"/training_runs/{run}/checkpoints/weights/a").raise_for_status()
        assert "path" in asker.save("b", ttl_seconds=3600)
        assert "max_checkpoint_bytes" in asker.save("c")["error"]
        ttl = f"/training_runs/{run}/checkpoints/weights/b/ttl"
        asker.http.put(ttl, json={"ttl_seconds": 1}).raise_for_status()
        time.sleep(1.1)
        assert "path" in asker.save("c")


@pytest.mark.parametrize("steps", [0, 1])
def test_checkpoint_takes_no_more_than_was_asked_for(service: Services, steps: int) -> None:
    adapter = Adapter(rank=4, seed=1)
    adam = AdamParams(
        learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0, grad_clip_norm=0
    )
    trainer = Trainer(Bigrams().new_policy("x", adapter), Bounds(64, 32, 1000))
    for _ in range(steps):
        for _, param in trainer.policy.named_parameters():
            param.grad = torch.ones_like(param)
        trainer.optim_step(adam)
    for optimizer, save in ((True, trainer.save), (False, trainer.save_adapter)):
        folder = service.folder / str(optimizer)
        folder.mkdir(parents=True)
        save(folder)
        written = sum(file.stat().st_size for file in folder.iterdir())
        assert written <= trainer.size(optimizer=optimizer) < written + 16_384


@pytest.mark.thorough
def test_adapters_are_downloaded_by_links_that_are_signed(service: Services) -> None:
    with service(api_keys=("tml-secret",)) as url:
        asker = Asker(url, key="tml-secret")
        asker.create()
        path = asker.result(asker.send("/save_weights_external", path="out"))["path"]
        assert path == f"tinker://{asker.model}/external_weights/out"
        age = asker.send("/save_weights_external", path="x", age_encryption_recipients=["age1"])
        assert "age_encryption_recipients" in asker.result(age)["error"]
        place = f"/training_runs/{asker.model}/checkpoints/external_weights/out"
        urls = asker.get(f"{place}/external_weights_urls")["urls"]
        assert set(urls) == {"adapter_model.safetensors", "adapter_config.json"}
        link = urls["adapter_model.safetensors"]
        assert httpx.get(link).content == adapter(service.folder, path)
        for other in (
            link.replace("adapter_model.safetensors", "adapter_config.json"),
            link.replace("expires=", "expires=9"),
            link[:-1] + ("0" if link[-1] != "0" else "1"),
        ):
            assert httpx.get(other).status_code == 403
        assert httpx.get(f"{url}/api/v1{place}/external_weights_urls").status_code == 401
        asker.http.delete(place)
        assert httpx.get(link).status_code == 404


@pytest.mark.thorough
def test_keys_pages_and_sizes(service: Services) -> None:
    with service(api_keys=("tml-secret",), max_body_bytes=1000) as url:
        for key in ("", "tml-other"):
            with pytest.raises(httpx.HTTPStatusError, match="API keys") as refusal:
                Asker(url, key=key)
            assert refusal.value.response.status_code == 401
        assert httpx.get(f"{url}/api/v1/healthz").json() == {"status": "ok"}
        asker = Asker(url, key="tml-secret")
        for headers, status in (
            ({"origin": "http://page"}, 403),
            ({"host": "page.example"}, 403),
            ({"content-encoding": "zstd"}, 415),
        ):
            answer = asker.http.post("/session_heartbeat", json={}, headers=headers)
            assert answer.status_code == status, answer.text
        assert asker.http.post("/telemetry", content=b"x" * 1001).status_code == 413
        pieces = iter([b"x" * 600, b"x" * 600])
        assert asker.http.post("/telemetry", content=pieces).status_code == 413
        assert asker.http.post("/create_session", content=b"{").status_code == 400
        assert asker.http.get("/nothing").status_code == 404
