"""The trainer of `rl_wire` in a separate process: `python -m benchmarks.wire_trainer URL MODEL
DTYPE`.

Uses only torch and HTTP: gloo as rank 0 of an ordinary group, and vLLM's routes. A JSON line
(see `peers.channel`) requests one update in one of `FLOWS`. The answer has the start and end times
(`time.perf_counter`, which all processes of a Linux machine share).
"""

import json
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.channel import open_channel, serve

PATIENCE = 120.0  # seconds
PACKED = 64 << 20  # bytes per run
PAUSED, GO_ON = "/pause?mode=keep&clear_cache=false", "/resume"
FLOWS: dict[str, tuple[Sequence[str], Sequence[str]]] = {  # before and after the update
    "in flight": ((), ()),
    "paused": ((PAUSED,), (GO_ON,)),
}


def post(url: str, path: str, body: Any = None) -> Any:
    """Send a POST request. Raises the exception of `urllib` for any status but 200."""
    content = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, content, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


class Trainer:
    """Holds weights under their checkpoint names and sends them repeatedly."""

    def __init__(self, url: str, model: str, dtype: str) -> None:
        import torch
        import torch.distributed as dist

        from benchmarks.ours import Options, opened
        from benchmarks.weight_transfer import state_dict

        with opened(Options(model, dtype, threads=1), kv_cache_memory=1 << 26) as engine:
            self._weights = state_dict(engine.model)
        torch.set_num_threads(1)
        self._torch, self._dist, self._url = torch, dist, url
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        info = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "packed": True,
        }
        joining = self._beside(
            "/init_weight_transfer_engine",
            {"init_info": info | {"packed_buffer_size_bytes": PACKED}},
        )
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
        joining()

    def update(self, flow: str) -> dict[str, Any]:
        before, behind = FLOWS[flow]
        began = time.perf_counter()
        for path in before:
            post(self._url, path)
        post(self._url, "/start_weight_update")
        told = {
            "names": list(self._weights),
            "dtype_names": [
                str(each.dtype).removeprefix("torch.") for each in self._weights.values()
            ],
            "shapes": [list(each.shape) for each in self._weights.values()],
        }
        answered = self._beside("/update_weights", {"update_info": told})
        self._broadcast()
        answered()
        post(self._url, "/finish_weight_update")
        for path in behind:
            post(self._url, path)
        size = sum(each.nbytes for each in self._weights.values())
        return {"began": began, "ended": time.perf_counter(), "bytes": size}

    def _broadcast(self) -> None:
        """Send vLLM's packed format. A run ends with the tensor that makes it longer
        than `PACKED`.
        """
        run: list[Any] = []
        for tensor in self._weights.values():
            run.append(tensor.view(-1).view(self._torch.uint8))
            if sum(map(len, run)) > PACKED:
                self._dist.broadcast(self._torch.cat(run), 0)
                run = []
        if run:
            self._dist.broadcast(self._torch.cat(run), 0)

    def _beside(self, path: str, body: Any) -> Any:
        """Send the request on a thread. Return a function that waits for the answer."""
        failed: list[Exception] = []

        def ask() -> None:
            try:
                post(self._url, path, body)
            except Exception as problem:
                failed.append(problem)

        thread = threading.Thread(target=ask)
        thread.start()

        def answered() -> None:
            thread.join(PATIENCE)
            if failed:
                raise failed[0]

        return answered


def main() -> None:
    answers = open_channel()
    trainer = Trainer(*sys.argv[1:4])
    serve(
        answers, lambda question: trainer.update(question["flow"]), {"config": "gloo, one thread"}
    )


if __name__ == "__main__":
    main()
