"""A hook of mkdocs: a link to a file that is not in docs/ becomes the file's name, since a site of
the pages alone has no such file.
"""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2].removeprefix('../')}`)", markdown)
