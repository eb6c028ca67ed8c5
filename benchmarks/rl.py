"""Costs on the trainer's side: weight updates, scores, gradients, abort. Compared measurements run
in turns.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import weight_transfer
from benchmarks.measure import Row, Stopwatch, show, spread
from benchmarks.ours import Options, opened
from benchmarks.workloads import HIGHEST_ID, LOWEST_ID
from nano_inference import InferenceEngine, SamplingParams
from nano_inference.rl import PolicyModel, score
from nano_inference.weights.sync import WeightSyncManager

RUNNING = 16  # running sequences during weight updates
CONTEXT = 256  # tokens of each, if the context matters
SHARED, MEMBERS, OWN = 1024, 16, 64  # score: shared tokens, sequences, tokens of each
ABORTED, ABORTED_AT = 256, (8, 100)  # requests, and the tokens of each at the abort
BATCH, LENGTH = 32, 64  # gradients


def measure(options: Options, parts: tuple[str, ...]) -> list[Row]:
    """Return the rows of these parts (`PARTS`)."""
    rows: list[Row] = []
    for part in parts:
        found = list(PARTS[part](options))
        show(part, {"what": lambda row: row["name"], "ms, or ratio": figure}, found)
        rows += found
    return rows


def figure(row: Row) -> Any:
    if "ratio" in row:
        return row["ratio"]
    return {
        name: value if name == "runs" else value * 1e3 for name, value in row["seconds"].items()
    }


def update(options: Options) -> Iterator[Row]:
    """Measure a blocking update of all weights against one copy of their bytes, and the pause of
    running requests.
    """
    with opened(options) as engine:
        weights = weight_transfer.state_dict(engine.model)
        weight_transfer.copy_and_update(engine, weights, 2)
        seconds = weight_transfer.copy_and_update(engine, weights, max(options.repeats, 3))
        size = sum(tensor.nbytes for tensor in weights.values())
        yield {
            "name": "copy of the weights' bytes",
            "bytes": size,
            "seconds": spread(seconds["copy"]),
        }
        yield {"name": "blocking update", "bytes": size, "seconds": spread(seconds["update"])}
        yield ratio("blocking update / copy", seconds["update"], seconds["copy"])
        run_many(engine, RUNNING)
        blocking = [
            seconds_of(lambda: engine.update_weights(weights, blocking=True, kv_policy="keep"))
        ]
        pauses = [pause_of_background_update(engine, weights) for _ in range(options.repeats)]
        blocking += [
            seconds_of(lambda: engine.update_weights(weights, blocking=True, kv_policy="keep"))
            for _ in range(options.repeats)
        ]
        engine.abort()
        yield {
            "name": f"pause of {RUNNING} requests, blocking update, keep",
            "seconds": spread(blocking[1:]),
        }
        yield {
            "name": f"pause of {RUNNING} requests, update from another thread",
            "seconds": spread(pauses),
        }


def pause_of_background_update(engine: InferenceEngine, weights: dict[str, torch.Tensor]) -> float:
    """Return the seconds by which the longest step exceeds the usual one while another thread
    publishes new weights.
    """
    updates: list[Any] = []
    trainer = threading.Thread(
        target=lambda: updates.append(engine.update_weights(weights, kv_policy="keep"))
    )
    usual = [seconds_of(engine.step) for _ in range(5)]
    trainer.start()
    steps = [seconds_of(engine.step)]
    while not updates or not updates[0].done():
        steps.append(seconds_of(engine.step))
    trainer.join()
    return max(steps) - statistics.median(usual)


def policies(options: Options) -> Iterator[Row]:
    """Measure the pause between two tokens of running requests at an update, by context policy."""
    with opened(options) as engine:
        weights = weight_transfer.state_dict(engine.model)
        for policy in ("keep", "recompute", "finish_old", "abort"):
            extra: list[float] = []
            for _ in range(options.repeats + 1):
                run_many(engine, RUNNING, CONTEXT - 32)
                usual = statistics.median([seconds_of(engine.step) for _ in range(5)])
                extra.append(seconds_of(lambda p=policy: gap(engine, weights, p)) - usual)
                engine.abort()
                engine.step()
            yield {
                "name": f"{RUNNING} requests of {CONTEXT} tokens, {policy}",
                "seconds": spread(extra[1:]),
            }


def gap(engine: InferenceEngine, weights: dict[str, torch.Tensor], policy: Any) -> None:
    """Update the weights and step until the remaining requests have a new token."""
    before = engine.stats().completion_tokens
    engine.update_weights(weights, kv_policy=policy)
    while engine.loop.sequences.by_id and engine.stats().completion_tokens < before + RUNNING:
        engine.step()


def broadcast(options: Options) -> Iterator[Row]:
    """Measure an update that a second process sends by gloo against a bare `dist.broadcast` of
    equal size.
    """
    with opened(options) as engine:
        runs = max(options.repeats, 3)
        seconds = weight_transfer.broadcast_and_send(WeightSyncManager(engine.model), runs)
        yield {"name": "bare gloo broadcast", "seconds": spread(seconds["broadcast"])}
        yield {"name": "update received by gloo and staged", "seconds": spread(seconds["update"])}
        yield ratio(
            "bare broadcast / update: share of its speed", seconds["broadcast"], seconds["update"]
        )


def scores(options: Options) -> Iterator[Row]:
    """Score a group with a long shared prompt, with and without the prefix cache."""
    rng = random.Random(0)
    with opened(options) as sharing, opened(options, enable_prefix_caching=False) as alone:
        watches = {"shared": Stopwatch(), "unshared": Stopwatch()}
        for warm in range(options.repeats + 1):
            prompt = token_ids(rng, SHARED)
            members = [prompt + token_ids(rng, OWN) for _ in range(MEMBERS)]
            found: list[list[torch.Tensor]] = []
            for watch, engine in zip(watches.values(), (sharing, alone), strict=True):
                used = watch if warm else Stopwatch()
                found.append(
                    used.time(lambda e=engine, m=members: score(e, m, from_position=SHARED))
                )
            assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        what = f"score of {MEMBERS} x {OWN} tokens after {SHARED:,} in common"
        yield watches["shared"].row(name=f"{what}, shared")
        yield watches["unshared"].row(name=f"{what}, each alone")
        yield ratio(
            f"{what}: each alone / shared", watches["unshared"].seconds, watches["shared"].seconds
        )


def abort(options: Options) -> Iterator[Row]:
    """Time an abort of all running samples, until their partial results are available."""
    with opened(options) as engine:
        for tokens in ABORTED_AT:
            watch = Stopwatch()
            for _ in range(options.repeats + 1):
                run_many(engine, ABORTED, tokens)
                began = time.perf_counter()
                samples = engine.abort()
                watch.add(time.perf_counter() - began, None)
                assert len(samples) == ABORTED
                # otherwise the next round would include the cost of freeing them
                del samples
            watch.seconds, watch.handovers = watch.seconds[1:], watch.handovers[1:]
            yield watch.row(name=f"abort of {ABORTED} running requests with {tokens} tokens each")


def gradients(options: Options) -> Iterator[Row]:
    """Measure logprobs and gradients of `PolicyModel`, a step of AdamW, and the publish into the
    engine.
    """
    rng = random.Random(0)
    with opened(options) as engine:
        policy = PolicyModel(engine)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, foreach=False)
        names = ("forward", "backward", "AdamW", "publish")
        watches = {name: Stopwatch() for name in names}
        for warm in range(options.repeats + 1):
            used = watches if warm else {name: Stopwatch() for name in names}
            sequences = [token_ids(rng, LENGTH) for _ in range(BATCH)]
            logprobs = used["forward"].time(lambda s=sequences: policy.logprobs(s, from_position=1))
            used["backward"].time(torch.cat(logprobs).mean().backward)
            used["AdamW"].time(optimizer.step)
            optimizer.zero_grad()
            used["publish"].time(policy.publish)
        for name, watch in watches.items():
            yield watch.row(name=f"PolicyModel, {BATCH} x {LENGTH} tokens: {name}")


def run_many(engine: InferenceEngine, number: int, tokens: int = 8) -> None:
    """Run this many requests in groups of 8 until each has sampled this many tokens, far from its
    end.
    """
    rng = random.Random(0)
    for _ in range(number // 8):
        engine.add_request(token_ids(rng, 32), SamplingParams(max_tokens=3000, ignore_eos=True), 8)
    while engine.stats().num_running < number:
        engine.step()
    for _ in range(tokens - 1):
        engine.step()


def token_ids(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(number)]


def ratio(name: str, above: list[float], below: list[float]) -> Row:
    return {"name": name, "ratio": spread(a / b for a, b in zip(above, below, strict=True))}


def seconds_of(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


PARTS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "update": update,
    "policies": policies,
    "broadcast": broadcast,
    "score": scores,
    "abort": abort,
    "gradients": gradients,
}
