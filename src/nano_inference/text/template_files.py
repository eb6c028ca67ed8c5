"""The chat templates of a model's folder, chosen as transformers does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nano_inference.errors import ModelLoadError
from nano_inference.system.regular_files import read_json


class ChatTemplates(NamedTuple):
    """Jinja sources.

    Attributes:
        default: of chats without tools; None: the folder has none.
        tools: of chats with tools; None: `default` is theirs too.
    """

    default: str | None
    tools: str | None


def read_templates(folder: Path, config: Mapping[str, Any]) -> ChatTemplates:
    """Templates of files, else those of `tokenizer_config.json`, else that of `chat_template.json`,
    a model's that also reads pictures.

    Args:
        folder: of the model.
        config: of its tokenizer.

    Raises:
        ModelLoadError: a template is no text.
    """
    try:
        named = _of_files(folder) or _of_config(config.get("chat_template"))
        if not named and (folder / "chat_template.json").is_file():
            named = _of_config(read_json(folder / "chat_template.json").get("chat_template"))
        for name in ("default", "tool_use"):
            if not isinstance(named.get(name), str | None):
                raise TypeError(f"it is a {type(named[name]).__name__}")
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"the chat template of {folder} cannot be read: {error}") from error
    return ChatTemplates(named.get("default"), named.get("tool_use"))


def _of_files(folder: Path) -> dict[str, Any]:
    found = {each.stem: each for each in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = folder / "chat_template.jinja"
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()}


def _of_config(said: Any) -> dict[str, Any]:
    """A template, or a list of templates with names."""
    if isinstance(said, list):
        return {each["name"]: each["template"] for each in said}
    return {} if said is None else {"default": said}
