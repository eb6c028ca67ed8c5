"""`nano-inference report`: write a file of samples as an HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from nano_bench.report_page import Page, Pieces
from nano_inference.cli import Debug, errors, write_file
from nano_inference.errors import ConfigError, InvalidRequest

SHOWN_REASONS = 5


def report(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="SAMPLES",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="JSON lines from `generate --json`.",
        ),
    ],
    out: Annotated[Path, typer.Option("--output", "-o", help="Write the page to this file.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Read the tokenizer from this folder. Default: show token_texts of the rows, or "
            "token ids.",
        ),
    ] = None,
    trainer_column: Annotated[
        str, typer.Option(metavar="NAME", help="Column of logprobs to compare with.")
    ] = "trainer_logprobs",
    title: Annotated[
        str | None, typer.Option(help="Title of the page. Default: the file's name.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write an HTML page of samples, with colored tokens.

    The page is a single file with groups side by side. Unreadable rows are skipped, counted and
    listed with their reasons.

    Examples:

    nano-inference report samples.jsonl -o report.html --tokenizer models/smollm2
    """
    if out.exists() and out.samefile(file):
        raise ConfigError(f"{out} is the file of samples; choose another --output.")
    page = Page(None if tokenizer is None else _pieces(tokenizer), trainer_column)
    with errors.status(f"reading {file}"), file.open("rb") as lines:
        page.read(lines)
    for reason in page.reasons[:SHOWN_REASONS]:
        errors.print(reason, markup=False, soft_wrap=True)
    if not page.count:
        raise InvalidRequest(f"{file} has no readable samples ({page.refused} lines).")
    write_file(out, page.html(title or file.name))
    errors.print(f"{page.count:,} samples, {page.refused:,} skipped lines: {out}", soft_wrap=True)


def _pieces(folder: Path) -> Pieces:
    from nano_inference.text import Detokenizer, load_tokenizer

    loaded = load_tokenizer(folder)

    def pieces(ids: list[int]) -> list[str]:
        detokenizer = Detokenizer(loaded, skip_special_tokens=False)
        texts = [detokenizer.push((token_id,)) for token_id in ids]
        if texts:
            texts[-1] += detokenizer.finish()
        return texts

    return pieces
