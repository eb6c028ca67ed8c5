"""The pages as a site: every page is in the navigation, every link resolves, and no page loads from
another host.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT

ASKED = re.compile(
    r"""(?:<script[^>]*\ssrc|<link[^>]*\shref|<img[^>]*\ssrc)=["']?(https?:[^"' >]*)"""
)


@pytest.mark.thorough
def test_site_is_built_and_needs_no_other_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert "not included in the" not in built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    for page in pages:
        assert ASKED.findall(page.read_text()) == [], page
