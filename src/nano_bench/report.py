"""`nano-inference report`: a file of samples as one page for a browser."""

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
            help="Samples as JSON lines, such as `generate --json` writes.",
        ),
    ],
    out: Annotated[Path, typer.Option("--output", "-o", help="The page.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="The tokenizer of this folder says what tokens are; without one, and without "
            "token_texts in the rows, ids are shown.",
        ),
    ] = None,
    trainer_column: Annotated[
        str, typer.Option(metavar="NAME", help="The rows' logprobs that mismatch is against.")
    ] = "trainer_logprobs",
    title: Annotated[str | None, typer.Option(help="Default: the file's name.")] = None,
    debug: Debug = False,
) -> None:
    """Make a page of samples: groups side by side, tokens coloured.

    One HTML file that needs no other. Rows that cannot be read are left out, counted and listed
    with their reasons.

    Examples:

    nano-inference report samples.jsonl -o report.html --tokenizer models/smollm2
    """
    if out.exists() and out.samefile(file):
        raise ConfigError(f"{out} holds the samples and cannot be the page too.")
    page = Page(None if tokenizer is None else _pieces(tokenizer), trainer_column)
    with errors.status(f"reading {file}"), file.open("rb") as lines:
        page.read(lines)
    for reason in page.reasons[:SHOWN_REASONS]:
        errors.print(reason, markup=False, soft_wrap=True)
    if not page.count:
        raise InvalidRequest(f"{file} holds no sample that can be read ({page.refused} lines).")
    write_file(out, page.html(title or file.name))
    errors.print(f"{page.count:,} samples, {page.refused:,} lines left out: {out}", soft_wrap=True)


def _pieces(folder: Path) -> Pieces:
    from nano_inference.text import Detokenizer, load_tokenizer

    loaded = load_tokenizer(folder)

    def pieces(ids: list[int]) -> list[str]:
        detokenizer = Detokenizer(loaded, skip_special_tokens=False)
        found = [detokenizer.push((each,)) for each in ids]
        if found:
            found[-1] += detokenizer.finish()
        return found

    return pieces
