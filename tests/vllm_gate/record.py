"""`python -m tests.vllm_gate.record`: ask vLLM's server everything, and keep the outlines of its
replies.

It needs `make peers` and takes three minutes. The ordinary tests compare our server with what is
kept.
"""

import json
import tempfile
from pathlib import Path

from tests.vllm_gate.cases import CASES
from tests.vllm_gate.outline import outline
from tests.vllm_gate.servers import ask, checkpoint, vllm

GOLDEN = Path(__file__).with_name("vllm.json")
Outlines = dict[str, list[str]]  # of a case, by its name


def kept() -> Outlines:
    """What vLLM said when it was asked."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def outlines(url: str) -> Outlines:
    """What a server says to all cases."""
    return {case.name: outline(ask(url, case)) for case in CASES}


def recorded(folder: Path) -> Outlines:
    """What vLLM says."""
    with vllm(checkpoint(folder / "model"), folder / "vllm.log") as url:
        return outlines(url)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cases = recorded(Path(folder))
    rows = (f"{json.dumps(name)}: {json.dumps(lines)}" for name, lines in cases.items())
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    print(f"{GOLDEN.name}: {len(cases)} replies")


if __name__ == "__main__":
    main()
