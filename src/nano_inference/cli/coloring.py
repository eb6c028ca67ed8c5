"""Tokens coloured by their logprobs; numbers where there are no colours."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from nano_inference.cli.terminal import printable

if TYPE_CHECKING:
    from nano_inference.text.tokenizer import Tokenizer
    from nano_inference.types import TrainingSample

# Tokens at least this probable: their style. Foreground and background both, and none of the
# sixteen colours that a terminal's theme changes, so it reads alike on dark and on light; the less
# probable the darker, for those who cannot tell the hues apart.
_LEVELS = (
    (0.9, "", "≥ 90 %"),
    (0.5, "color(16) on color(228)", "≥ 50 %"),
    (0.1, "color(16) on color(215)", "≥ 10 %"),
    (0.01, "color(16) on color(203)", "≥ 1 %"),
    (0.0, "color(231) on color(88)", "< 1 %"),
)


def has_colors(console: Console) -> bool:
    """Whether colours reach the reader: not in files, not where NO_COLOR is set."""
    return console.color_system is not None and not console.no_color


def legend(console: Console) -> Text:
    """What the colours mean."""
    if not has_colors(console):
        return Text("Every token is followed by its logprob.")
    line = Text("probability of a token: ")
    for _, style, name in _LEVELS:
        line.append(f" {name} ", style).append(" ")
    return line


def colored(sample: "TrainingSample", tokenizer: "Tokenizer", console: Console) -> Text:
    """All tokens of a completion, those that end it included."""
    text = Text()
    for piece, logprob in _pieces(sample, tokenizer):
        if not has_colors(console):
            text.append(f"{printable(piece)}[{logprob:.2f}]")
            continue
        style = next(style for least, style, _ in _LEVELS if math.exp(logprob) >= least)
        # A line end has no width to be coloured.
        text.append(printable(piece).replace("\n", "↵\n" if style else "\n"), style)
    return text


def _pieces(sample: "TrainingSample", tokenizer: "Tokenizer") -> Iterator[tuple[str, float]]:
    """Text token by token. Tokens that make a character together come together, with the least of
    their logprobs.
    """
    from nano_inference.text.detokenizer import Detokenizer

    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    least = 0.0
    for token_id, logprob in zip(sample.completion_tokens, sample.logprobs, strict=True):
        least = min(least, logprob)
        if piece := detokenizer.push((token_id,)):
            yield piece, least
            least = 0.0
    if rest := detokenizer.finish():
        yield rest, least
