"""An mkdocs hook that replaces a link to a file outside docs/ by the file's name, since the site
contains only the pages.
"""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2].removeprefix('../')}`)", markdown)
