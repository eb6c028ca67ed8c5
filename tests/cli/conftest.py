"""Tiny models with and without tokenizer and chat template."""

from typing import Any

import pytest
import torch

from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_model

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Create models without end token: with a chat template, without one, without tokenizer."""
    made: dict[str, str] = {}
    for name, template in (("chat", TEMPLATE), ("base", None), ("bare", None)):
        changes: dict[str, Any] = {
            "max_position_embeddings": 60_000,
            "vocab_size": 259,
            "eos_token_id": None,
        }
        folder = tiny_model(tmp_path_factory.mktemp(name), "llama", **changes)
        if name != "bare":
            write_tokenizer(folder, template)
        made[name] = str(folder)
    return made


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
