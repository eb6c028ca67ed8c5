"""Replay every file of golden exchanges on a fresh server."""

from pathlib import Path

import pytest

import nano_inference
from nano_inference.server.main import running_server
from tests.server.trainers.conftest import RL, engine_config
from tests.server.trainers.golden import FOLDER, differs, masked, replay


@pytest.mark.thorough(cases=["sglang"])
@pytest.mark.parametrize("dialect", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_golden_replies_are_unchanged(
    dialect: str, tiny_folder: Path, request: pytest.FixtureRequest
) -> None:
    with running_server(engine_config(tiny_folder), RL) as url:
        words = {"<model>": str(tiny_folder), "<release>": nano_inference.__version__}
        replay(url, dialect, words, update=request.config.getoption("--update-golden"))


def test_comparison_sees_what_it_must() -> None:
    reply = {"id": "cmpl-1", "choices": [{"logprob": -1.00004, "text": "at /x/model"}]}
    golden = masked(reply, {"<model>": "/x/model"})
    assert golden == {"id": "<id>", "choices": [{"logprob": -1.0, "text": "at <model>"}]}
    assert differs(masked(reply | {"id": "cmpl-2"}, {"<model>": "/x/model"}), golden) is None
    assert differs(golden | {"choices": []}, golden) == "reply.choices has 0 items, not 1"
    assert differs({"a": True}, {"a": 1}) == "reply.a is True"
    assert differs({"a": -1.1}, {"a": -1.0}) == "reply.a is -1.1"
    assert differs({}, {"a": None}) == "reply has other keys: ['a']"
