"""Our server's replies to 214 requests, compared with those of a real vLLM server on the same
checkpoint.

vllm.json holds vLLM's replies. If vLLM is installed (`make peers`), the slow test records them
again.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.docs.test_docs import ROOT
from tests.vllm_gate.cases import CASES, Case
from tests.vllm_gate.differences import DIFFERENCES, differing
from tests.vllm_gate.outline import outline
from tests.vllm_gate.record import kept, recorded
from tests.vllm_gate.servers import VLLM, ask, checkpoint, ours

THEIRS = kept()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    threads = torch.get_num_threads()
    with ours(checkpoint(tmp_path_factory.mktemp("model"))) as address:
        yield address
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def lines_of(url: str) -> Callable[[Case], list[str]]:
    """Return the differing lines of a case. Each case is sent once."""

    our_lines: dict[str, list[str]] = {}

    def lines(case: Case) -> list[str]:
        if case.name not in our_lines:
            our_lines[case.name] = outline(ask(url, case))
        return differing(THEIRS[case.name], our_lines[case.name])

    return lines


@pytest.mark.thorough(
    cases=[
        "chat/plain",
        "chat/n",
        "chat/n-greedy",
        "chat/prompt-logprobs-all",
        "completions/stop",
        "completions/prompt-logprobs-all",
        "completions/logprobs-all",
    ]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_server_answers_like_vllm(lines_of: Callable[[Case], list[str]], case: Case) -> None:
    unexplained = [
        line
        for line in lines_of(case)
        if not any(each.covers(case.name, line) for each in DIFFERENCES)
    ]
    assert not unexplained, "\n" + "\n".join(unexplained)


@pytest.mark.thorough
def test_differences_exist_and_are_documented(lines_of: Callable[[Case], list[str]]) -> None:
    page = " ".join((ROOT / "docs" / "differences.md").read_text().split())
    for difference in DIFFERENCES:
        concerned = (case for case in CASES if difference.concerns(case.name))
        covered = any(
            difference.covers(case.name, line) for case in concerned for line in lines_of(case)
        )
        assert covered or difference.by_chance, f"stale: {difference}"
        assert difference.why in page, f"docs/differences.md does not say: {difference.why}"


@pytest.mark.slow
@pytest.mark.skipif(not VLLM.exists(), reason=f"there is no {VLLM}; make peers makes it")
def test_vllm_answers_match_the_record(tmp_path: Path) -> None:
    assert recorded(tmp_path) == THEIRS
