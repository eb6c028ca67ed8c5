"""The seeded faults are run now and then; that they still apply to the sources is looked at
always.
"""

import subprocess
from pathlib import Path

import pytest

from tests.mutants.run import CATCHES

HERE = Path(__file__).parent


def test_every_fault_has_tests_that_are_to_catch_it() -> None:
    assert {patch.stem for patch in HERE.glob("*.patch")} == set(CATCHES)


@pytest.mark.parametrize("name", CATCHES)
def test_it_applies(name: str) -> None:
    command = ["git", "apply", "--check", str(HERE / f"{name}.patch")]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
