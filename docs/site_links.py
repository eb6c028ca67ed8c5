"""Hook of mkdocs: replace links to files outside docs/ by the files' names, because the site holds
only the pages.
"""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(_name, markdown)


def _name(link: re.Match[str]) -> str:
    path = link[2].removeprefix("../")
    name = link[1].strip("`")
    return link[1] if path.rstrip("/").endswith(name.rstrip("/")) else f"{link[1]} (`{path}`)"
