"""A trainer that drives a server like slime and Miles: rollouts by `/generate`, and new weights over
a `torch.distributed` group during rollouts. The trainer uses SGLang's routes and imports only the
reader of checkpoints from nano-inference.

    nano-inference serve MODEL --rl
    python examples/slime_like.py http://127.0.0.1:8000 --mode abort

There is no training: a "step" adds a little noise to all weights. In slime's mode `abort`, each
update aborts the rollouts, which then resume from their tokens. In Miles's modes `retract` and
`in_place` they continue without a break. At the end the script checks that each update arrived bit
for bit, and that every token has its weight version and the versions never decrease.
"""

import argparse
import hashlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import httpx
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from nano_inference.checkpoints.loading import read_tensors

GROUP = "slime-pp_0"
PATIENCE = 60.0  # timeout of every operation in seconds


@dataclass
class Sample:
    """A rollout so far, from one or more requests."""

    prompt: list[int]
    seed: int
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[str] = field(default_factory=list[str])  # one per token
    aborts: int = 0


class Engine:
    """Client of SGLang's routes."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a request. Raises with the server's reply if it is rejected."""
        reply = self._http.post(path, json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"{path} was answered with {reply.status_code}: {reply.text}")
        return reply.json()

    def get(self, path: str) -> Any:
        """Send a GET request. Raises `httpx.HTTPStatusError` if it is rejected."""
        return self._http.get(path).raise_for_status().json()

    def flush_cache(self) -> int:
        """Flush the cache, like slime: retry until it succeeds. Return the number of attempts."""
        for count in range(1, 61):
            if self._http.get("/flush_cache").status_code == 200:
                return count
            time.sleep(0.05)
        raise TimeoutError("the cache could not be flushed: requests are still running.")

    def checksums(self) -> dict[str, str]:
        """Return the first 16 digits of the SHA-256 of every live tensor."""
        return self.post("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]


class Rollouts:
    """Endless rollouts, a fixed number at a time, until `finish`."""

    def __init__(self, engine: Engine, count: int, max_tokens: int) -> None:
        self._engine, self._max_tokens = engine, max_tokens
        self._seeds = itertools.count(1)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(count)
        self._workers = [self._pool.submit(self._work) for _ in range(count)]

    def wait_until_under_way(self) -> None:
        """Wait until the engine runs rollouts. Raises the error of a failed rollout."""
        until = time.monotonic() + PATIENCE
        while not self._engine.get("/v1/loads?include=core")["loads"][0]["num_running_reqs"]:
            for worker in self._workers:
                if worker.done():
                    worker.result()
            require(time.monotonic() < until, "no rollout runs")

    def __enter__(self) -> Self:
        """Return the rollouts, which are already running."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop starting rollouts, also if the trainer has failed."""
        self._stop.set()
        self._pool.shutdown()

    def finish(self) -> list[Sample]:
        """Wait for the running rollouts and return all samples."""
        self._stop.set()
        return [sample for worker in self._workers for sample in worker.result(PATIENCE)]

    def _work(self) -> list[Sample]:
        samples: list[Sample] = []
        while not self._stop.is_set():
            seed = next(self._seeds)
            samples.append(Sample([5 + seed % 7, 6, 7], seed))
            self._complete(samples[-1])
        return samples

    def _complete(self, sample: Sample) -> None:
        """Generate a rollout. After an abort, resume from its tokens (partial rollouts)."""
        while len(sample.tokens) < self._max_tokens:
            sampling = {
                "temperature": 1.0,
                "max_new_tokens": self._max_tokens - len(sample.tokens),
                "sampling_seed": sample.seed,
                "ignore_eos": True,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "spaces_between_special_tokens": False,
            }
            body = {
                "input_ids": sample.prompt + sample.tokens,
                "sampling_params": sampling,
                "return_logprob": True,
                "rid": f"sample-{sample.seed}",
            }
            meta = self._engine.post("/generate", body)["meta_info"]
            sample.tokens += [token_id for _, token_id, _ in meta["output_token_logprobs"]]
            sample.logprobs += [logprob for logprob, _, _ in meta["output_token_logprobs"]]
            for span in meta["weight_versions"]:
                sample.versions += [span["version"]] * (span["end"] - span["start"])
            sample.aborts += meta["finish_reason"]["type"] == "abort"


class Trainer:
    """A trainer that holds the weights and sends them in buckets."""

    def __init__(
        self, engine: Engine, weights: dict[str, Tensor], mode: str, bucket_bytes: int
    ) -> None:
        self._engine, self._mode, self._bucket_bytes = engine, mode, bucket_bytes
        self._weights = weights
        self._noise = torch.Generator().manual_seed(0)
        # an earlier trainer may have left a group
        served = engine.get("/get_weight_version")["weight_version"]
        self.version = int(served) if served.isdigit() else 0
        engine.post("/update_weight_version", {"new_version": str(self.version)})
        self.num_buckets = 0

    def connect(self) -> None:
        """Create a named group with the engine, independent of other groups."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        told = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": GROUP,
            "backend": "gloo",
        }
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(self._engine.post, "/init_weights_update_group", told)
            self._group = named_group(f"tcp://127.0.0.1:{port}", 2)
            joined.result(PATIENCE)

    def disconnect(self) -> None:
        """Leave the group on both sides."""
        self._engine.post("/destroy_weights_update_group", {"group_name": GROUP})
        dist.destroy_process_group(self._group)

    def step(self) -> None:
        """Add noise to all weights in place of training."""
        for name, tensor in self._weights.items():
            noise = torch.randn(tensor.shape, generator=self._noise) * 0.01
            self._weights[name] = (tensor.float() + noise).to(tensor.dtype)

    def publish(self) -> None:
        """Pause, flush, send, continue. Miles also marks the start and end of an update."""
        self.version += 1
        post, is_miles = self._engine.post, self._mode != "abort"
        post("/pause_generation", {"mode": self._mode} if is_miles else {})
        if self._mode != "in_place":
            self._engine.flush_cache()
        if is_miles:
            post("/begin_weight_update", {"selector": "all"})
        with ThreadPoolExecutor(1) as pool:
            for bucket in self._buckets():
                told = {
                    "names": [name for name, _ in bucket],
                    "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                    "shapes": [list(tensor.shape) for _, tensor in bucket],
                    "group_name": GROUP,
                    "flush_cache": False,
                    "weight_version": str(self.version),
                }
                taken = pool.submit(post, "/update_weights_from_distributed", told)
                for _, tensor in bucket:
                    dist.broadcast(tensor, 0, group=self._group)
                taken.result(PATIENCE)
                self.num_buckets += 1
        if is_miles:
            post(
                "/update_weight_version",
                {"new_version": str(self.version), "abort_all_requests": False},
            )
            post("/end_weight_update", {})
        post("/continue_generation", {})

    def check(self) -> None:
        """Check that the live weights are the sent ones."""
        version = self._engine.get("/get_weight_version")["weight_version"]
        require(version == str(self.version), f"version {version} is live, not {self.version}")
        served = self._engine.checksums()
        for name, tensor in self._weights.items():
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            require(
                served[name] == hashlib.sha256(data).hexdigest()[:16],
                f"the live values of {name} differ from the sent ones",
            )

    def _buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._weights.items():
            if bucket and size + tensor.nbytes > self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor.contiguous()))
            size += tensor.nbytes
        yield bucket


def named_group(address: str, world_size: int) -> Any:
    """Create a process group with its own store, as rank 0. Torch has no public function for a
    second group of this kind.
    """
    timeout = timedelta(seconds=PATIENCE)
    store, _, _ = next(dist.rendezvous(address, 0, world_size, timeout=timeout))  # pyright: ignore
    store.set_timeout(timeout)
    name = c10d.GroupName(GROUP)
    store = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        world_size, 0, [], "gloo", store, group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def require(is_so: bool, problem: str) -> None:
    """Raise `SystemExit` unless a condition holds."""
    if not is_so:
        raise SystemExit(problem)


def check_samples(samples: list[Sample], mode: str, newest: int, max_tokens: int) -> None:
    """Check that every token has a logprob and a version, and that versions never decrease."""
    for sample in samples:
        lengths = {len(sample.tokens), len(sample.logprobs), len(sample.versions)}
        require(
            lengths == {max_tokens},
            f"sample {sample.seed} has {lengths} tokens, logprobs and versions",
        )
        numbers = [int(each) for each in sample.versions]
        require(
            numbers == sorted(numbers),
            f"sample {sample.seed} has decreasing versions: {sample.versions}",
        )
        require(numbers[-1] <= newest, f"sample {sample.seed} has unknown versions")
        require(
            mode == "abort" or not sample.aborts,
            f"sample {sample.seed} was aborted in mode {mode}",
        )
    crossed = [sample for sample in samples if len(set(sample.versions)) > 1]
    require(bool(crossed), "no sample was running during an update")
    require(
        mode != "abort" or all(sample.aborts for sample in crossed),
        "a sample changed its version without an update",
    )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Drive a server as slime does.")
    parser.add_argument("url", help="URL of the server")
    parser.add_argument(
        "model",
        type=Path,
        nargs="?",
        help="folder of its model; default: the folder that the server reports",
    )
    parser.add_argument("--mode", choices=("abort", "retract", "in_place"), default="abort")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--requests", type=int, default=4, help="rollouts in flight")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of a rollout")
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20)
    given = parser.parse_args()

    engine = Engine(given.url)
    # so that the sent weights are served bit for bit
    dtype = getattr(torch, engine.get("/server_info")["dtype"])
    folder = given.model or Path(engine.get("/model_info")["tokenizer_path"])
    weights = {name: tensor.to(dtype) for name, tensor in read_tensors(folder)}
    trainer = Trainer(engine, weights, given.mode, given.bucket_bytes)
    trainer.connect()
    with Rollouts(Engine(given.url), given.requests, given.max_tokens) as rollouts:
        for _ in range(given.updates):
            trainer.step()
            rollouts.wait_until_under_way()
            trainer.publish()
            trainer.check()
        samples = rollouts.finish()
    check_samples(samples, given.mode, trainer.version, given.max_tokens)
    trainer.disconnect()
    told = {
        "mode": given.mode,
        "version": trainer.version,
        "buckets": trainer.num_buckets,
        "samples": len(samples),
        "crossed": sum(len(set(sample.versions)) > 1 for sample in samples),
        "aborts": sum(sample.aborts for sample in samples),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
