"""All experts of a layer in one tensor, as transformers has them in memory: one name table for all
transports.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    SamplingParams,
    WeightPatch,
    WeightUpdateError,
)
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.remote.engine_weights import EngineWeights
from nano_inference.server.control.requests.sglang import GROUP as SGLANG_GROUP
from nano_inference.server.main import running_server
from nano_inference.weights.sources import cut_into_buckets
from nano_inference.weights.transports import Deadline, receive_update
from nano_inference.weights.transports.broadcast import BroadcastReceiver
from nano_inference.weights.transports.files import WeightFiles, WeightFolder, write_folder
from nano_inference.weights.transports.rendezvous import (
    default_room,
    device_room,
    join_group,
    serve_store,
)
from nano_inference.weights.transports.sender import WeightSender
from nano_ray.verl.buckets import opened, parcels, parcels_of
from tests.models.tiny import family_weights, tiny_model, write_model
from tests.server.trainers.asking import ask
from tests.server.trainers.conftest import RL
from tests.server.trainers.group_trainer import packed

Weights = dict[str, Tensor]
CPU = torch.device("cpu")
PATIENCE = 30.0


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        str(folder),
        device="cpu",
        num_threads=1,
        kv_cache_memory=2**22,
        block_size=4,
        dtype="float32",
    )


def in_memory(stored: Weights) -> Weights:
    """Return a checkpoint's tensors under the names and shapes of transformers."""
    held = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for layer in sorted({name.split(".mlp.")[0] for name in stored if ".experts." in name}):
        experts = [f"{layer}.mlp.experts.{i}" for i in range(6)]
        pairs = [
            [stored[f"{each}.{name}_proj.weight"] for name in ("gate", "up")] for each in experts
        ]
        held[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        held[f"{layer}.mlp.experts.down_proj"] = torch.stack(
            [stored[f"{each}.down_proj.weight"] for each in experts]
        )
    return held


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny Qwen3-MoE of three layers, the middle one without experts."""
    return tiny_model(tmp_path_factory.mktemp("moe"), "qwen3-moe")


@pytest.fixture(scope="module")
def old(folder: Path) -> Weights:
    return family_weights(json.loads((folder / "config.json").read_text()), 0)


@pytest.fixture(scope="module")
def new(folder: Path) -> Weights:
    return in_memory(family_weights(json.loads((folder / "config.json").read_text()), 1))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[InferenceEngine]:
    threads = torch.get_num_threads()
    with InferenceEngine(config_of(folder)) as engine:
        yield engine
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected(
    engine: InferenceEngine, new: Weights, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Return scores of an engine built with the new weights under checkpoint names."""
    config = json.loads((folder / "config.json").read_text())
    with InferenceEngine(
        config_of(write_model(tmp_path_factory.mktemp("new"), config, family_weights(config, 1)))
    ) as built:
        return score(built), built.weights_checksum()


def score(engine: InferenceEngine) -> Any:
    samples = engine.generate(
        [list(range(3, 20)), [5, 9, 7]], SamplingParams(temperature=0.0, max_tokens=6)
    )
    return [(each.completion_tokens, each.logprobs) for each in samples]


# -- into an engine --------------------------------------------------------------------------------


def by_receiving(engine: InferenceEngine, transport: Any) -> None:
    update = receive_update(engine.weight_sync, transport, timeout=PATIENCE)
    while not update.wait(0.01):
        engine.step()
    update.result(0)


def stream(engine: InferenceEngine, weights: Weights, _: Path) -> None:
    with (
        WeightSender(timeout=PATIENCE, bucket_bytes=100_000) as sender,
        ThreadPoolExecutor(1) as pool,
    ):
        sent = pool.submit(sender.send, weights)
        by_receiving(engine, BroadcastReceiver(sender.address))
        sent.result(PATIENCE)


def changed(engine: InferenceEngine, weights: Weights, _: Path) -> None:
    """Return the update as patches of every number."""
    patches: list[WeightPatch] = []
    for name, tensor in weights.items():
        order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(0))
        patches.append(WeightPatch(name, order, tensor.flatten()[order]))
    engine.update_weights(iter([patches]), blocking=True)


def parcelled(engine: InferenceEngine, weights: Weights, _: Path) -> None:
    """Send the update in the buckets of verl and Ray."""

    async def theirs() -> list[Any]:
        return [each async for each in parcels(weights.items(), 100_000)]

    shapes = engine.weight_sync.shapes
    buckets = [opened(parcel, shapes) for parcel in asyncio.run(theirs())]
    assert sum(map(len, buckets)) == len(weights)
    assert [opened(parcel, shapes).keys() for parcel in parcels_of(weights.items())]
    engine.update_weights(iter(buckets), blocking=True)


INTO_AN_ENGINE: dict[str, Callable[[InferenceEngine, Weights, Path], object]] = {
    "state_dict": lambda engine, weights, _: engine.update_weights(
        weights, blocking=True, complete=True
    ),
    "buckets": lambda engine, weights, _: engine.update_weights(
        cut_into_buckets(weights, 50_000), blocking=True
    ),
    "folder": lambda engine, weights, at: by_receiving(
        engine, WeightFolder(write_folder(at / "w", weights))
    ),
    "files": lambda engine, weights, at: by_receiving(
        engine, WeightFiles(write_folder(at / "w", weights))
    ),
    "path": lambda engine, weights, at: engine.update_weights(
        write_folder(at / "w", weights), blocking=True
    ),
    "stream": stream,
    "patches": changed,
    "parcels": parcelled,
}


@pytest.mark.parametrize("transport", INTO_AN_ENGINE)
def test_fused_names_arrive_over_every_transport(
    engine: InferenceEngine,
    old: Weights,
    new: Weights,
    expected: Any,
    tmp_path: Path,
    transport: str,
) -> None:
    engine.update_weights(old, blocking=True)
    assert score(engine) != expected[0]
    INTO_AN_ENGINE[transport](engine, new, tmp_path)
    assert (score(engine), engine.weights_checksum()) == expected


# -- over HTTP -------------------------------------------------------------------------------------


class Trainer:
    """Rank 0 of a group of two, on threads of this process."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._pool = ThreadPoolExecutor(1)

    @contextmanager
    def group(self, room: str, path: str, **told: Any) -> Iterator[ProcessGroup]:
        store = serve_store(("127.0.0.1", 0), PATIENCE)
        made = self._pool.submit(
            join_group, store, room, 0, 2, "gloo", CPU, "127.0.0.1", Deadline(PATIENCE)
        )
        where = {
            "master_address": "127.0.0.1",
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": 2,
        }
        ask(
            self.url,
            path,
            {"init_info": where} if "init" in path and "engine" in path else where | told,
        )
        group = made.result(PATIENCE)
        yield group
        group.close()

    @contextmanager
    def sending(self, group: ProcessGroup, tensors: list[Tensor]) -> Iterator[None]:
        def send() -> None:
            for tensor in tensors:
                group.broadcast(tensor.clone(), Deadline(PATIENCE), "a tensor")

        sent = self._pool.submit(send)
        yield
        sent.result(PATIENCE)


def told(weights: Weights, dtypes: str) -> dict[str, Any]:
    return {
        "names": list(weights),
        dtypes: ["float32"] * len(weights),
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }


def by_vllm(trainer: Trainer, weights: Weights, *, packed_bytes: int | None = None) -> None:
    tensors = list(weights.values())
    with trainer.group(default_room("gloo"), "/init_weight_transfer_engine") as group:
        ask(trainer.url, "/start_weight_update", {})
        info = told(weights, "dtype_names")
        if packed_bytes is not None:
            info |= {"packed": True, "packed_buffer_size_bytes": packed_bytes}
            tensors = packed(tensors, packed_bytes)
        with trainer.sending(group, tensors):
            ask(trainer.url, "/update_weights", {"update_info": info})
        ask(trainer.url, "/finish_weight_update", {})
        ask(trainer.url, "/shutdown_weight_transfer_engine", {})


def by_sglang(trainer: Trainer, weights: Weights) -> None:
    room = f"{SGLANG_GROUP}/{device_room(SGLANG_GROUP, 'gloo')}"
    with trainer.group(room, "/init_weights_update_group", backend="gloo") as group:
        with trainer.sending(group, list(weights.values())):
            ask(trainer.url, "/update_weights_from_distributed", told(weights, "dtypes"))
        ask(trainer.url, "/destroy_weights_update_group", {})


def by_tensor(trainer: Trainer, weights: Weights) -> None:
    reply = httpx.post(
        f"{trainer.url}/update_weights_from_tensor",
        content=save(weights),
        headers={"content-type": "application/octet-stream"},
        timeout=PATIENCE,
    )
    assert reply.status_code == 200, reply.text


def by_disk(trainer: Trainer, weights: Weights, at: Path) -> None:
    ask(
        trainer.url,
        "/update_weights_from_disk",
        {"model_path": str(write_folder(at / "w", weights))},
    )


OVER_HTTP: dict[str, Callable[[Trainer, Weights, Path], None]] = {
    "vllm": lambda trainer, weights, _: by_vllm(trainer, weights),
    "vllm, packed": lambda trainer, weights, _: by_vllm(trainer, weights, packed_bytes=30_000),
    "sglang": lambda trainer, weights, _: by_sglang(trainer, weights),
    "from_tensor": lambda trainer, weights, _: by_tensor(trainer, weights),
    "from_disk": by_disk,
}


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    threads = torch.get_num_threads()
    with running_server(config_of(folder), RL) as url:
        yield url
    torch.set_num_threads(threads)


@pytest.mark.parametrize("transport", OVER_HTTP)
def test_fused_names_arrive_in_every_dialect(
    url: str, old: Weights, new: Weights, expected: Any, tmp_path: Path, transport: str
) -> None:
    trainer = Trainer(url)
    by_tensor(trainer, old)
    told = lambda: ask(url, "/weight_checker", {"action": "checksum"})["checksums"]  # noqa: E731
    assert told() != expected[1]
    OVER_HTTP[transport](trainer, new, tmp_path)
    assert told() == expected[1]


# -- what is refused -------------------------------------------------------------------------------

ONE = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({ONE: torch.zeros(5, 64, 64)}, r"has shape \(5, 64, 64\), expected \(6, 64, 64\)"),
        ({ONE: torch.zeros(6, 64, 64, dtype=torch.int64)}, "must be a floating point tensor"),
        (
            {
                ONE: torch.zeros(6, 64, 64),
                "model.layers.0.mlp.experts.3.up_proj.weight": torch.zeros(32, 64),
            },
            "twice",
        ),
        (
            [WeightPatch(ONE, torch.tensor([6 * 64 * 64]), torch.zeros(1))],
            "has index 24576, which is outside its 24576",
        ),
        ([WeightPatch(ONE, torch.tensor([-1]), torch.zeros(1))], "has index -1, which is outside"),
        (
            [WeightPatch(ONE, torch.tensor([5000, 5000]), torch.zeros(2))],
            "index 904 more than once",
        ),
        (
            [WeightPatch(ONE, torch.tensor([1.0]), torch.zeros(1))],
            "must be an int64 tensor",
        ),
        (
            {ONE.replace("layers.0", "layers.1"): torch.zeros(6, 64, 64)},
            "is not a tensor of this model",
        ),
    ],
)
def test_fused_tensor_that_does_not_fit_is_rejected(
    engine: InferenceEngine, more: Any, why: str
) -> None:
    before = engine.weights_checksum()
    with pytest.raises(WeightUpdateError, match=why):
        engine.update_weights(more if isinstance(more, dict) else iter([more]), blocking=True)
    assert engine.weights_checksum() == before


def test_bucket_that_a_link_takes_is_checked_by_the_same_table(
    engine: InferenceEngine, new: Weights
) -> None:
    """Update through the call that verl's and Ray's engines use."""
    link = EngineWeights(engine)
    link.begin_update(1)
    for parcel in parcels_of(new.items()):
        link.receive_bucket(1, lambda shapes, parcel=parcel: opened(parcel, shapes))
    assert link.cancel_update(1, "the test is over")
