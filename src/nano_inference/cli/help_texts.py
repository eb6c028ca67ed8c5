"""`--help` with the common options, and `--help-all` with every option."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from nano_inference.cli.field_options import Flags

WIDE = 100  # columns at which a table shows every option name whole
_ALL = "nano_inference.help_all"  # key in a context: show every option


class Command(TyperCommand):
    """Command whose `--help` hides rare options.

    Attributes:
        common: Parameters that `--help` shows. Empty: all.
        flags: Options by configuration field, for messages (`field_options.with_flags`).
    """

    common: tuple[str, ...] = ()
    flags: Flags = MappingProxyType({})

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the number of hidden options in the last line. A narrow terminal
        gets `--help-all` as plain text, since a table would cut option names.
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
        for param in rare:
            param.hidden = True
        if rare:
            self.epilog = f"{len(rare)} more options: {ctx.command_path} --help-all"
        try:
            yield
        finally:
            self.epilog = None
            for param in rare:
                param.hidden = False


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
