"""The recorded checkpoints of the GRPO loop, which every processor gives."""

import sys

import pytest

from examples import same_hash
from tests.ops.compiler import NEEDS_COMPILER


@NEEDS_COMPILER
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "sums"), [("bfloat16", "pairs"), ("bfloat16", "tiles"), ("float32", "pairs")]
)
def test_short_run_reaches_the_recorded_checkpoint(
    dtype: str, sums: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--short", "--dtype", dtype, "--sums", sums])
    same_hash.main()
    assert "It is the one recorded" in capsys.readouterr().out


def test_law_of_sums_counts_only_in_bfloat16() -> None:
    laws = ("pairs", "tiles")
    run = same_hash.STEPS, same_hash.SEED
    exact, rounded = (
        {same_hash.recorded(dtype, law, *run) for law in laws} for dtype in ("float32", "bfloat16")
    )
    assert None not in exact | rounded
    assert (len(exact), len(rounded)) == (1, 2)
    assert same_hash.recorded("bfloat16", "pairs", same_hash.STEPS, 1) is None


def test_other_checkpoint_ends_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="Other processors gave abc"):
        same_hash.compare("abc", "abd")
    same_hash.compare(None, "abd")
    assert "No checkpoint" in capsys.readouterr().out
