"""Two engine cores exchange blocks in their messages."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import InferenceEngine
from nano_inference.remote.core import EngineCore
from nano_inference.remote.directory import Directory, names_of, pack_names, report_of
from nano_inference.remote.messages import Call, Failed, Returned
from tests.models.tiny import tiny_llama
from tests.server.engines import config_of, params_of

PROMPT = [5 + place % 90 for place in range(30)]


class Core:
    """Core whose engine never steps and only answers calls."""

    def __init__(self, model: Path) -> None:
        self.said: queue.Queue[Any] = queue.Queue()
        self.engine = InferenceEngine(config_of(model))
        self.core = EngineCore(self.engine, self.said.put)

    def call(self, name: str, **arguments: Any) -> Any:
        self.core.handle(Call(1, name, arguments))
        answer = self.said.get(timeout=20)
        if isinstance(answer, Failed):
            raise AssertionError(f"{answer.error}: {answer.message}")
        assert isinstance(answer, Returned)
        return answer.value


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Core, Core]]:
    threads, model = torch.get_num_threads(), tiny_llama(tmp_path)
    cores = Core(model), Core(model)
    yield cores
    for core in cores:
        core.engine.shutdown()
    torch.set_num_threads(threads)


def test_blocks_move_between_cores_and_update_the_directory(pair: tuple[Core, Core]) -> None:
    source, target = pair
    directory = Directory()
    names = names_of(PROMPT, 4, 0)
    assert names == source.engine.blocks.names(PROMPT)
    for name, core in (("source", source), ("target", target)):
        directory.add(name)
        assert directory.take(name, report_of(core.call("report_blocks")))
    want = source.engine.generate([PROMPT], params_of(3))[0]
    assert directory.take("source", report_of(source.call("report_blocks")))
    holder = directory.longest(names)
    assert holder is not None
    assert holder == ("source", 7)
    about = source.call("describe_blocks")
    here = 0
    while here < holder.num_blocks:
        data = source.call(
            "export_blocks", names=pack_names(names), first=here, max_bytes=3 * about["block_bytes"]
        )
        assert isinstance(data, bytes)
        here = target.call("import_blocks", data=data)
    assert target.call("describe_blocks") == about | {"exported": 0, "imported": 7}
    assert directory.take("target", report_of(target.call("report_blocks")))
    assert directory.count("target", names) == 7
    got = target.engine.generate([PROMPT], params_of(3))[0]
    assert got.cached_tokens == 28
    assert (got.completion_tokens, got.logprobs) == (want.completion_tokens, want.logprobs)
    target.engine.flush_cache()
    assert directory.take("target", report_of(target.call("report_blocks")))
    assert directory.count("target", names) == 0


def test_blocks_that_cannot_be_exchanged_fail_the_call(pair: tuple[Core, Core]) -> None:
    source, target = pair
    assert source.call("export_blocks", names=pack_names(names_of(PROMPT, 4, 0))) is None
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("export_blocks", {"names": b"short"}, "not a whole number of block names"),
        ("export_blocks", {"names": b"", "max_bytes": 1 << 40}, "max_bytes from 1 to"),
        ("export_blocks", {"names": b"", "first": -1}, "max_bytes from 1 to"),
        ("import_blocks", {"data": b"stranger"}, "shorter than their header"),
        ("export_block", {}, "is not an engine operation"),
    ]
    for name, arguments, text in wrong:
        with pytest.raises(AssertionError, match=f"InvalidRequest: .*{text}"):
            target.call(name, **arguments)
