"""Weights as the bytes of a safetensors file, and as files on the engine's machine."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from nano_inference.errors import WeightUpdateError
from nano_inference.remote.client import EngineClient
from nano_inference.remote.in_process import InProcessClient
from nano_inference.server.control import updates
from nano_inference.server.control.control import Control
from nano_inference.weights.transports.files import write_folder
from tests.server.engines import Run
from tests.server.trainers.group_trainer import new_weights
from tests.server.trainers.weight_runs import (
    NORM,
    checksums,
    refused,
)


@pytest.fixture(scope="module")
def client_kind() -> type[EngineClient]:
    return InProcessClient


def test_file_comes_in_parts(
    control: Control, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        for part, seed in ((7, 1), (1000, 2), (2**24, 3)):
            if part == 7:
                content = save({NORM: new_weights(folder, seed)[NORM]}, metadata={"format": "pt"})
            else:
                content = save(new_weights(folder, seed, "bfloat16"))
            monkeypatch.setattr(updates, "PART", part)
            await control.updates.begin(complete=part != 7)
            await control.updates.receive_file(content)
            await control.updates.finish()
            if part != 7:
                assert await control.checksums.get() == checksums(folder, seed, "bfloat16")

    run(test())


def header(told: Any, size: int) -> bytes:
    text = json.dumps(told).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def one(**changes: Any) -> dict[str, Any]:
    return {NORM: {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]} | changes}


FILES: dict[str, tuple[bytes, str]] = {
    "pickle": (
        pickle.dumps({"a": 1}),
        "a pickle, which is not supported; send the bytes of a safetensors file",
    ),
    "zip": (b"PK\3\4" + bytes(100), "a zip archive, as torch.save makes it; send"),
    "empty": (b"", "not a safetensors file"),
    "text": (b'{"names": []}', "not a safetensors file"),
    "long header": ((2**62).to_bytes(8, "little") + b"{}" + bytes(9), "its header would have"),
    "cut header": (header(one(), 0)[:30], "ends in the middle of a safetensors header"),
    "cut": (header(one(), 100), "describes 256 bytes of tensors, but the file has 100"),
    "more": (header(one(), 300), "describes 256 bytes of tensors, but the file has 300"),
    "no json": (header("x", 0).replace(b'"x"', b"{x}"), "header cannot be read"),
    "deep": (
        header({}, 0)[:0] + (4000).to_bytes(8, "little") + b'{"a":' + b"[" * 3995,
        "header cannot be read",
    ),
    "offsets": (
        header(one(data_offsets=[8, 264]), 264),
        "bytes 8 to 264, which do not match its size",
    ),
    "negative": (header(one(data_offsets=[-256, 0]), 256), "bytes -256 to 0"),
    "words": (header(one(data_offsets=["a", "b"]), 256), "bytes 'a' to 'b'"),
    "dtype": (header(one(dtype="I64"), 256), "has dtype 'I64'"),
    "shape": (header(one(shape=[8, 8]), 256), "has shape"),
    "name": (header({"x": one()[NORM]}, 256), "'x' is not a tensor of this model"),
    "nothing": (header({}, 0), "describes 0 bytes"),
}


@pytest.mark.parametrize("case", FILES)
def test_invalid_safetensors_bytes_are_rejected(control: Control, run: Run, case: str) -> None:
    content, told = FILES[case]

    async def test() -> None:
        await control.updates.begin()
        async with refused(control, 400, told):
            await control.updates.receive_file(content)

    run(test())


def test_folders_and_files_on_disk(
    client: InProcessClient, control: Control, folder: Path, run: Run, tmp_path: Path
) -> None:
    async def take(path: Path) -> str:
        await control.updates.begin()
        await control.updates.receive_folder(str(path))
        return await control.updates.finish()

    async def test() -> None:
        newest = int(await client.call("get_weight_version"))
        plain, marked = tmp_path / "plain", tmp_path / "marked"
        plain.mkdir()
        weights = new_weights(folder, 4)
        save_file({name: weights[name] for name in list(weights)[:9]}, plain / "a.safetensors")
        save_file({name: weights[name] for name in list(weights)[9:]}, plain / "b.safetensors")
        assert await take(plain) == str(newest + 1)
        assert await control.checksums.get() == checksums(folder, 4)
        write_folder(marked, new_weights(folder, 6), version=newest + 7, max_file_bytes=100_000)
        assert await take(marked) == str(newest + 7)
        assert await control.checksums.get() == checksums(folder, 6)
        save_file(weights, plain / "c.safetensors")
        assert await take(plain / "c.safetensors") == str(newest + 8)
        (marked / "weights-00002.safetensors").write_bytes(b"x")
        (tmp_path / "empty").mkdir()
        torch.save(weights, tmp_path / "model.bin")
        for path, told in (
            (tmp_path / "nowhere", "the path does not exist on the engine's machine"),
            (tmp_path / "empty", "the folder is empty; a model folder holds"),
            (tmp_path / "model.bin", "model.bin cannot be read as safetensors"),
            (marked, "weights-00002.safetensors has 1 bytes"),
            (plain, "came twice"),
        ):
            await control.updates.begin()
            async with refused(control, 400, told):
                await control.updates.receive_folder(str(path))

    run(test())


def test_engine_itself_closes_a_session_that_something_failed_in(
    client: EngineClient, control: Control, folder: Path, run: Run
) -> None:
    """Close a session on failure for every caller: drop its tensors and accept no more."""

    async def test() -> None:
        before = await control.checksums.get()
        content = save({NORM: new_weights(folder, 5)[NORM]})
        fields = {"session": 10**6, "seconds": 5.0}
        again = {"size": len(content), "content": content}
        newest = await client.call("begin_update", session=10**6)
        await client.call("receive_file", **fields, **again)
        end = {"version": newest + 1, "kv_policy": "keep"}
        for name, more in (
            ("receive_file", again),
            ("receive_file", again),
            ("finish_update", end),
        ):
            with pytest.raises(WeightUpdateError, match="occurs twice"):
                await client.call(name, **fields, **more)
        assert await control.checksums.get() == before

    run(test())
