"""`--help` with the options that most people need, and `--help-all` with every option."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from nano_inference.cli.field_options import Flags

WIDE = 100  # columns in which no name of an option is cut
_ALL = "nano_inference.help_all"  # a context's note that every option is wanted


class Command(TyperCommand):
    """A command whose `--help` hides the options that few people need.

    Attributes:
        common: Parameters that `--help` shows. Empty: all.
        flags: Options by configuration field, for messages (`field_options.with_flags`).
    """

    common: tuple[str, ...] = ()
    flags: Flags = MappingProxyType({})

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; the last line counts the options that it leaves out. A narrow terminal
        gets all options as plain text, since a table would cut their names.
        """
        markup = self.rich_markup_mode
        if ctx.meta.get(_ALL) and shutil.get_terminal_size().columns < WIDE:
            self.rich_markup_mode = None
        try:
            with self._without_rare(ctx):
                super().format_help(ctx, formatter)
        finally:
            self.rich_markup_mode = markup

    @contextmanager
    def _without_rare(self, ctx: Any) -> Iterator[None]:
        shown = {*self.common, "help_all"}
        rare: list[Any] = [
            each
            for each in self.params
            if self.common and not ctx.meta.get(_ALL) and each.name not in shown
        ]
        rare = [each for each in rare if not each.hidden]
        for each in rare:
            each.hidden = True
        if rare:
            self.epilog = f"{len(rare)} more options: {ctx.command_path} --help-all"
        try:
            yield
        finally:
            self.epilog = None
            for each in rare:
                each.hidden = False


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        is_eager=True,
        callback=_show_all,
        show_default=False,
        rich_help_panel="Messages",
        help="Show every option and exit.",
    ),
]
