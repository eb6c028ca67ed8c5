"""Temporary folders that pass files to engines on this machine."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def temporary_folder(what: str) -> AsyncIterator[Path]:
    """Yield a new folder of mode 0700, named after its purpose. Delete it at the end."""
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=f"nano-inference-{what}-"))
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, True)
