"""How far a long `generate` is: a bar, or a function of the caller's."""

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from nano_inference.engine.loop import EngineLoop

# (finished samples, samples in all, completion tokens so far), called after every step
ProgressFunction = Callable[[int, int, int], None]
Progress = ProgressFunction | bool | None

LONG = 2.0  # seconds after which a bar appears by itself


class _Shown:
    """Reports of one `generate`."""

    def __init__(
        self, report: ProgressFunction | None, bar: "tqdm[Any] | None", total: int, loop: EngineLoop
    ):
        self.report, self.bar, self.total, self.loop = report, bar, total, loop
        self.tokens_before = loop.num_completion_tokens

    def __call__(self, left: int) -> None:
        """After a step; `left` samples have not ended."""
        tokens = self.loop.num_completion_tokens - self.tokens_before
        if self.report is not None:
            self.report(self.total - left, self.total, tokens)
        if self.bar is not None:
            self.bar.n = self.total - left
            elapsed = self.bar.format_dict["elapsed"]
            use = self.loop.cache.share_in_use()
            self.bar.set_postfix_str(
                f"{tokens / max(elapsed, 1e-9):,.0f} tok/s, KV {use:.0%}", refresh=False
            )
            self.bar.update(0)

    def close(self) -> None:
        """Nothing more will be reported."""
        if self.bar is not None:
            self.bar.close()


def progress_of(progress: Progress, total: int, loop: EngineLoop) -> _Shown:
    """What `generate` calls after every step."""
    if callable(progress):
        return _Shown(progress, None, total, loop)
    wanted = progress if progress is not None else sys.stderr.isatty()
    bar: tqdm[Any] | None = None
    if wanted:
        bar = tqdm(total=total, unit="sample", delay=0 if progress else LONG, dynamic_ncols=True)
    return _Shown(None, bar, total, loop)
