"""A trainer in SGLang's dialect: it requests over HTTP and broadcasts from a separate process
(`group_trainer.py`).
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from tests.ports import free_port
from tests.server.trainers.children import GroupTrainer
from tests.server.trainers.group_trainer import new_weights

PATIENCE = 30.0
GROUP = "slime-pp_0"


def post(url: str, path: str, body: Any = None, status: int = 200) -> Any:
    """Send a request and check the reply's status."""
    reply = httpx.post(url + path, json={} if body is None else body, timeout=PATIENCE)
    assert reply.status_code == status, f"{path}: {reply.status_code} {reply.text[:500]}"
    told = reply.json()
    if status != 200:
        assert told["success"] is False
        assert told["message"] == told["error"]["message"]
    return told


def version(url: str) -> str:
    return httpx.get(f"{url}/get_weight_version").json()["weight_version"]


def checksums(url: str) -> dict[str, str]:
    return post(url, "/weights_checker")["ranks"][0]["checksums"]


def checksums_of(weights: dict[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()[:16]
        for name, tensor in weights.items()
    }


def told_of(weights: dict[str, Tensor], **more: Any) -> dict[str, Any]:
    """Return an update request's description of its tensors."""
    return {
        "names": list(weights),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
        "group_name": GROUP,
        "flush_cache": False,
        **more,
    }


class Trainer(GroupTrainer):
    """A trainer in SGLang's dialect and the process at its end of the group."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(folder)
        self.url = url
        self._pool = ThreadPoolExecutor(4)

    def beside(self, act: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        return self._pool.submit(act, *arguments)

    def join(self, status: int = 200, **more: Any) -> Any:
        """Join a group on both sides by `/init_weights_update_group`."""
        port = free_port()
        if status == 200:
            self.say("join", name=GROUP, port=port, named=True)
        fields = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": GROUP,
            "backend": "gloo",
            **more,
        }
        reply = post(self.url, "/init_weights_update_group", fields, status)
        if status == 200:
            assert self.hear() == "done"
        return reply

    def send(self, seed: int, names: list[str], **more: Any) -> Any:
        """Send one bucket of the weights that `new_weights` makes from a seed."""
        weights = new_weights(self.folder, seed)
        asked = self.beside(
            post,
            self.url,
            "/update_weights_from_distributed",
            told_of({n: weights[n] for n in names}, **more),
        )
        self.say("send", group=GROUP, names=names, seed=seed)
        reply = asked.result(PATIENCE)
        assert self.hear() == "done"
        return reply

    def buckets(self, count: int) -> list[list[str]]:
        names = list(new_weights(self.folder, 0))
        size = -(-len(names) // count)
        return [names[begin : begin + size] for begin in range(0, len(names), size)]

    def close(self) -> None:
        super().close()
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def trainer_of(url: str, folder: Path) -> Iterator[Trainer]:
    """Run a trainer that ends with the block."""
    trainer = Trainer(url, folder)
    try:
        yield trainer
    finally:
        trainer.close()


@contextmanager
def rollout(url: str, **sampling: Any) -> Iterator["Future[Any]"]:
    """Run a request that is in flight when the block begins."""
    sampling = {"max_new_tokens": 480, "ignore_eos": True, "sampling_seed": 1} | sampling
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": sampling,
        "return_logprob": True,
        "rid": "rollout",
    }
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, url, "/generate", body)
        while not httpx.get(f"{url}/v1/loads?include=core").json()["loads"][0]["num_running_reqs"]:
            assert not asked.done()
        yield asked
        asked.result(PATIENCE)
