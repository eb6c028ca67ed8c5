"""Send every case to vLLM's server and record the outlines of its replies.

Run `python -m tests.vllm_gate.record`. It needs `make peers` and takes three minutes. The ordinary
tests compare our server with the recorded outlines.
"""

import json
import tempfile
from pathlib import Path

from tests.vllm_gate.cases import CASES
from tests.vllm_gate.outline import outline
from tests.vllm_gate.servers import ask, checkpoint, vllm

GOLDEN = Path(__file__).with_name("vllm.json")
Outlines = dict[str, list[str]]  # per case name


def kept() -> Outlines:
    """Return the recorded outlines of vLLM."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def outlines(url: str) -> Outlines:
    """Return a server's outlines of all cases."""
    return {case.name: outline(ask(url, case)) for case in CASES}


def recorded(folder: Path) -> Outlines:
    """Return vLLM's outlines from a running server."""
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
