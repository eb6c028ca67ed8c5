"""Chat templates of a model's folder, chosen as in transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nano_inference.errors import ModelLoadError
from nano_inference.system.regular_files import read_json


class ChatTemplates(NamedTuple):
    """Jinja sources.

    Attributes:
        default: Template of chats, or None.
        tools: Template of chats with tools. None: `default` is for these too.
    """

    default: str | None
    tools: str | None


def read_templates(folder: Path, config: Mapping[str, Any]) -> ChatTemplates:
    """Read the templates in `.jinja` files, else in `tokenizer_config.json`, else in
    `chat_template.json`, which some multimodal models have.

    Args:
        folder: Folder of the model.
        config: Config of its tokenizer.

    Raises:
        ModelLoadError: A template is not text.
    """
    try:
        named = _of_files(folder) or _of_config(config.get("chat_template"))
        if not named and (folder / "chat_template.json").is_file():
            named = _of_config(read_json(folder / "chat_template.json").get("chat_template"))
        for name in ("default", "tool_use"):
            if not isinstance(named.get(name), str | None):
                raise TypeError(f"it is a {type(named[name]).__name__}")
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"cannot read the chat template of {folder}: {error}") from error
    return ChatTemplates(named.get("default"), named.get("tool_use"))


def _of_files(folder: Path) -> dict[str, Any]:
    files = {each.stem: each for each in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return {name: path.read_text(encoding="utf-8") for name, path in files.items()}


def _of_config(said: Any) -> dict[str, Any]:
    """Return templates by name, from one template or a list with names."""
    if isinstance(said, list):
        return {each["name"]: each["template"] for each in said}
    return {} if said is None else {"default": said}
