"""A tiny model whose vocabulary contains the token ids of the workloads."""

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from benchmarks.ours import Options
from tests.models.tiny import tiny_llama


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama(
        folder,
        vocab_size=49_152,
        hidden=16,
        inner=16,
        num_heads=2,
        num_kv_heads=1,
        layers=1,
        tie=True,
        max_position=4352,
    )
    words = Tokenizer(
        models.WordLevel({f"w{place}": place for place in range(49_152)}, unk_token="w0")
    )
    words.decoder = decoders.ByteLevel()  # every id has a complete text of its own
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return Options(model=str(folder), dtype="float32", backend="reference", threads=1, repeats=1)


@pytest.fixture(autouse=True)
def threads_are_left_as_they_were() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
