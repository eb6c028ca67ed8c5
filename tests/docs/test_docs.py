"""Every python block of the documents runs; each document's blocks share one namespace, in order."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_code_blocks_run(name: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), flags=re.M | re.S)
    assert blocks or name != "README.md"
    threads, namespace = torch.get_num_threads(), {"__name__": name}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in LINK.findall((ROOT / name).read_text()):
        assert ((ROOT / name).parent / target).exists(), target
