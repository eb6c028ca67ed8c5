"""Every python block of the documents runs. The blocks of a document share one
namespace, in order.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import nano_inference

ROOT = Path(__file__).parents[2]
# Their blocks need a server or other packages. See test_server.py, test_rl_frameworks.py,
# test_training_service.py and ../ray_fleet/test_ray.py.
ELSEWHERE = {
    "docs/from-trl.md",
    "docs/server.md",
    "docs/routes.md",
    "docs/rl-frameworks.md",
    "docs/ray.md",
    "docs/training-service.md",
}
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
VAGUE = re.compile(r"\b(somebody|nobody|anybody|whoever)\b", re.IGNORECASE)
LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.thorough(
    cases=[
        "README.md",
        "docs/adapters.md",
        "docs/caches.md",
        "docs/errors.md",
        "docs/getting-started.md",
        "docs/rl.md",
        "docs/sampling.md",
        "docs/speculation.md",
        "docs/structured.md",
    ]
)
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name not in ELSEWHERE])
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


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="Python versions spell types differently"
)
def test_api_reference_is_current_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    monkeypatch.setattr(make_api, "TARGET", tmp_path / "api.md")
    make_api.main()
    assert (tmp_path / "api.md").read_text() == (ROOT / "docs" / "api.md").read_text(), (
        "run python docs/make_api.py"
    )
    named = {name for names in make_api.GROUPS.values() for name in names}
    assert named == set(nano_inference.__all__)


def test_sentences_name_the_actor() -> None:
    """The glossary names the actors: a caller, a client, a thread, a rank."""
    sources = [*(ROOT / "src").rglob("*"), *(ROOT / name for name in DOCUMENTS)]
    texts = {
        path: path.read_text() for path in sources if path.suffix in {".py", ".h", ".cpp", ".md"}
    }
    vague = {
        f"{path.relative_to(ROOT)}:{number}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if VAGUE.search(line) and "whoever |" not in line  # the glossary's own row
    }
    assert len(texts) > 400
    assert not vague
