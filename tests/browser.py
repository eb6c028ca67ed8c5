"""Pages in a browser without a window."""

import shutil
import subprocess
from pathlib import Path

import pytest

NEEDS_CHROMIUM = pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")


def shown_by_chromium(page: str, folder: Path) -> str:
    """Return the document that a page's script has made, as HTML.

    Args:
        page: The page.
        folder: Folder for its file and the browser's.
    """
    file = folder / "page.html"
    file.write_text(page)
    words = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/user")
    done = subprocess.run(
        ["chromium", *words, "--virtual-time-budget=20000", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout
