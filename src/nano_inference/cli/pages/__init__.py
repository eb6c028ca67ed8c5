"""HTML pages that are one file: no network, no code but their own.

Imports only from: text, checkpoints.
Begin with: one_file.py, then samples.py.
Tests: tests/nano_bench/test_report.py, tests/nano_train/test_run_page.py.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.cli.pages.one_file import encoded as encoded
    from nano_inference.cli.pages.one_file import html_page as html_page
    from nano_inference.cli.pages.one_file import text_of as text_of
    from nano_inference.cli.pages.pieces import Pieces as Pieces
    from nano_inference.cli.pages.pieces import pieces_of_folder as pieces_of_folder
    from nano_inference.cli.pages.pieces import pieces_of_model as pieces_of_model
    from nano_inference.cli.pages.samples import MOST_REASONS as MOST_REASONS
    from nano_inference.cli.pages.samples import SampleBlock as SampleBlock

_MODULES = {
    "MOST_REASONS": "samples",
    "Pieces": "pieces",
    "SampleBlock": "samples",
    "encoded": "one_file",
    "html_page": "one_file",
    "pieces_of_folder": "pieces",
    "pieces_of_model": "pieces",
    "text_of": "one_file",
}
__getattr__ = lazy(__name__, _MODULES)
