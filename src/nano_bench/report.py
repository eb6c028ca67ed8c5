"""`nano-inference report`: write a file of samples as an HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from nano_inference.cli import Debug, errors, write_file
from nano_inference.cli.pages import SampleBlock, encoded, html_page, pieces_of_folder, text_of
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
    block = SampleBlock(None if tokenizer is None else pieces_of_folder(tokenizer), trainer_column)
    with errors.status(f"reading {file}"), file.open("rb") as lines:
        block.read(lines)
    for reason in block.reasons[:SHOWN_REASONS]:
        errors.print(reason, markup=False, soft_wrap=True)
    if not block.count:
        raise InvalidRequest(f"{file} has no readable samples ({block.refused} lines).")
    write_file(out, page_of(block, title or file.name))
    errors.print(f"{block.count:,} samples, {block.refused:,} skipped lines: {out}", soft_wrap=True)


def page_of(block: SampleBlock, title: str) -> str:
    """Return the page of a block of samples."""
    return html_page(
        title,
        body=text_of("samples.html"),
        style=text_of("samples.css"),
        script=text_of("samples.js") + 'load(contentOf("data"));\n',
        data={"data": encoded(block.content())},
    )
