"""Tokens outside `tokenizer.json`: in `tokenizer_config.json`, `added_tokens.json` and
`special_tokens_map.json`. Some fine-tunes write tokens only there. As in transformers, each token
gets its id in the vocabulary, or the next free one.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from nano_inference.system.regular_files import read_json

# in the order in which transformers adds them
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_NAMES = tuple(f"{name}_token" for name in NAMES)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def with_special_tokens_map(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer's config, merged with `special_tokens_map.json` for old folders."""
    path = folder / "special_tokens_map.json"
    if "added_tokens_decoder" in config or not path.is_file():
        return dict(config)
    return {**config, **read_json(path)}


def add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokens that `backend` lacks.

    Args:
        backend: Tokenizer from `tokenizer.json`, changed in place.
        folder: Folder of the model.
        config: Config from `with_special_tokens_map`.

    Raises:
        TypeError, ValueError: A file has values that are not tokens.
    """
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    named = [
        *(config.get(name) for name in _NAMES),
        *(value for key, value in config.items() if key.endswith("_token") and key not in _NAMES),
    ]
    more = extra.values() if isinstance(extra, Mapping) else extra
    special_tokens = [
        *(_token(each, special=True) for each in named if each and _is_token(each)),
        *(_token(each) for each in more),
    ]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in (
        *_numbered(folder, config, {each.content for each in special_tokens}),
        *special_tokens,
    ):
        if token.content not in known:
            known.add(token.content)
            backend.add_tokens([token])


def _numbered(
    folder: Path, config: Mapping[str, Any], special: Iterable[str]
) -> Iterator[AddedToken]:
    """Yield the tokens that are listed by id, in order of their ids."""
    if "added_tokens_decoder" in config:
        tokens = {int(key): value for key, value in config["added_tokens_decoder"].items()}
        for _, token in sorted(tokens.items()):
            yield AddedToken(token["content"], **_flags(token))
        return
    path = folder / "added_tokens.json"
    if path.is_file():
        for content, _ in sorted(read_json(path).items(), key=lambda each: int(each[1])):
            is_special = content in special
            yield AddedToken(content, normalized=not is_special, special=is_special)


def _is_token(value: object) -> bool:
    """Return True if a value is a token. Keys that end in `_token` also have other values."""
    return isinstance(value, str) or (
        isinstance(value, Mapping) and isinstance(value.get("content"), str)
    )


def _token(value: Any, **flags: bool) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    return AddedToken(value["content"], **{"special": True, **_flags(value), **flags})


def _flags(token: Mapping[str, Any]) -> dict[str, bool]:
    return {name: bool(token[name]) for name in _FLAGS if name in token}
