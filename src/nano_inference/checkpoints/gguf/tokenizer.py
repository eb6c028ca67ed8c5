"""Conversion of a GGUF file's tokenizer to Hugging Face's files.

Only `tokenizer.*` is read: tokens with their types and scores, merges, and the name of the
pre-tokenizer. The architecture matters only for Gemma and Phi-3, whose files omit some properties
of their SentencePiece vocabulary.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from nano_inference.checkpoints.gguf.header import read_header
from nano_inference.checkpoints.gguf.splits import SPLIT_RULES, WITHOUT_A_NAME, SplitRule
from nano_inference.errors import ModelLoadError, one_line
from nano_inference.system.regular_files import MISSING_TOKENIZER

# token types by llama.cpp's numbers
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"  # SentencePiece's space
# Hugging Face name of a special token -> GGUF name
_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}
Merges = list[tuple[str, str]]


@dataclass(frozen=True)
class GgufVocabulary:
    """Tokenizer data of a GGUF file.

    Attributes:
        path: Path of the file.
        architecture: Architecture of the model.
        metadata: Metadata of the file, including lists.
    """

    path: Path
    architecture: str
    metadata: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of `tokenizer.ggml.NAME`."""
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        return default if value is None else value

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        return self.get("eos_token_id")

    @cached_property
    def tokens(self) -> list[str]:
        """Texts of all tokens by id. An empty token gets a name that occurs in no text."""
        return [
            token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(self.get("tokens", ()))
        ]

    @cached_property
    def types(self) -> list[int]:
        """Types of all tokens by id."""
        return list(self.get("token_type", ())) or [_NORMAL] * self.vocab_size

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Map of `bos_token`, `eos_token` and so on to the token's text."""
        ids = {name: self.get(f"{own}_token_id") for name, own in _SPECIAL.items()}
        return {name: self.tokens[each] for name, each in ids.items() if each is not None}

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Jinja sources of chat templates by name."""
        named = {
            key.removeprefix("tokenizer.chat_template."): value
            for key, value in self.metadata.items()
            if key.startswith("tokenizer.chat_template.")
        }
        default = self.metadata.get("tokenizer.chat_template")
        return named if default is None else {"default": default, **named}

    @property
    def chat_template(self) -> str | None:
        """Chat template for conversations without tools."""
        return self.chat_templates.get("default")


def read_vocabulary(path: Path) -> GgufVocabulary | None:
    """Return a file's tokenizer data, or None if it has no tokenizer.

    Raises:
        ModelLoadError: The file cannot be read, or its data is inconsistent.
    """
    metadata = read_header(path, token_lists=True).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    vocabulary = GgufVocabulary(path, str(metadata.get("general.architecture")), metadata)
    try:
        _check(vocabulary)
    except (TypeError, ValueError, LookupError, AttributeError) as problem:
        raise _broken(path, problem) from problem
    return vocabulary


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template of a GGUF file to
    `folder`.

    Writes nothing if the file has no tokenizer.

    Raises:
        ModelLoadError: The tokenizer's kind is unknown, or its data is broken.
    """
    vocabulary = read_vocabulary(path)
    if vocabulary is None:
        return
    build = _MODELS.get(vocabulary.get("model"))
    if build is None:
        raise ModelLoadError(
            f"{path} has a tokenizer of kind {vocabulary.get('model')!r}; supported: "
            f"{', '.join(sorted(_MODELS))}"
        )
    try:
        built = build(vocabulary)
        _add_whole_tokens(built.backend, vocabulary)
        _add_processor(built, vocabulary)
        built.backend.save(str(folder / "tokenizer.json"))
    except (ModelLoadError, OSError):
        raise
    except Exception as problem:  # tokenizers raises plain Exception
        raise _broken(path, problem) from problem
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": built.adds_bos,
        "add_eos_token": bool(vocabulary.get("add_eos_token")),
        **vocabulary.special_tokens,
        **_templates(vocabulary, folder),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def write_tokenizer_or_reason(path: Path, folder: Path) -> None:
    """Write the tokenizer. If it is not supported, write the reason, which `load_tokenizer` raises.

    The model itself still loads, and can be used with another tokenizer.
    """
    try:
        write_tokenizer(path, folder)
    except ModelLoadError as problem:
        (folder / MISSING_TOKENIZER).write_text(str(problem), encoding="utf-8")


def _broken(path: Path, problem: Exception) -> ModelLoadError:
    return ModelLoadError(f"the tokenizer of {path} is broken: {one_line(problem)}")


def _check(vocabulary: GgufVocabulary) -> None:
    """Raise `ValueError`, or a similar error, if the lists are inconsistent."""
    tokens = vocabulary.tokens
    for name in ("token_type", "scores"):
        values = vocabulary.get(name)
        if values is not None and len(values) != len(tokens):
            raise ValueError(f"{name} has {len(values)} entries for {len(tokens)} tokens")
    if len(set(tokens)) < len(tokens):
        seen = set[str]()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise ValueError(f"the token {twice!r} is duplicated")
    for name in _SPECIAL.values():
        token_id = vocabulary.get(f"{name}_token_id")
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ValueError(f"{name}_token_id={token_id} exceeds the {len(tokens)} tokens")
    for name, template in vocabulary.chat_templates.items():
        if not isinstance(template, str):
            raise TypeError(f"the chat template {name} is not a string")


def _templates(vocabulary: GgufVocabulary, folder: Path) -> dict[str, Any]:
    """Write a single template as a file. Return several as an entry of tokenizer_config.json."""
    named = vocabulary.chat_templates
    if named.keys() == {"default"}:
        (folder / "chat_template.jinja").write_text(named["default"], encoding="utf-8")
        return {}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    return {"chat_template": listed} if listed else {}


# -- the tokenizers --------------------------------------------------------------------------------


class _Built(NamedTuple):
    """Tokenizer, and a flag: True if it begins a sequence with BOS."""

    backend: tokenizers.Tokenizer
    adds_bos: bool


def _byte_level(vocabulary: GgufVocabulary) -> _Built:
    """Build BPE over bytes, each written as a character."""
    rule = _rule(vocabulary)
    vocab = _spelled(vocabulary)
    model = BPE(vocab, _merges(vocabulary), fuse_unk=False, ignore_merges=rule.whole_words)
    backend = tokenizers.Tokenizer(model)
    if rule.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), "isolated") for each in rule.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return _Built(backend, bool(vocabulary.get("add_bos_token", rule.adds_bos)))


def _rule(vocabulary: GgufVocabulary) -> SplitRule:
    name = vocabulary.get("pre")
    if name is None:
        return WITHOUT_A_NAME
    if name not in SPLIT_RULES:
        raise ModelLoadError(
            f"{vocabulary.path} has an unknown pre-tokenizer (tokenizer.ggml.pre): {name!r}"
        )
    return SPLIT_RULES[name]


def _spelled(vocabulary: GgufVocabulary) -> dict[str, int]:
    """Return a map of tokens to ids, with ordinary tokens spelled in the byte alphabet."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    named = set(vocabulary.special_tokens.values())
    vocab = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    for token, token_id in list(vocab.items()):
        is_whole = token in named or vocabulary.types[token_id] in _WHOLE
        if is_whole or alphabet.issuperset(token):
            continue
        written = "".join(piece for piece, _ in spelling.pre_tokenize_str(token))
        if written not in vocab:
            del vocab[token]
            vocab[written] = token_id
    return vocab


def _sentencepiece(vocabulary: GgufVocabulary) -> _Built:
    """Build BPE over characters, with bytes for characters that are not tokens."""
    shape = _SENTENCEPIECE.get(vocabulary.architecture, _LLAMA)
    if vocabulary.get("model") == "gemma4" or not vocabulary.get("add_space_prefix", True):
        shape = shape._replace(prefix=None)
    tokens = vocabulary.tokens
    if shape.in_order:
        tokens = [token if token.strip(" ") else _SPACE * len(token) for token in tokens]
        scores: Sequence[float] | None = [-float(token_id) for token_id in range(len(tokens))]
    else:
        scores = vocabulary.get("scores")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if vocabulary.get("merges") is not None:
        merges = _merges(vocabulary)
    elif scores is None:
        raise ValueError("neither merges nor scores are present")
    else:
        merges = _merges_of_scores(vocab, scores)
    unknown = vocabulary.special_tokens.get("unk_token")
    model = BPE(vocab, merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    backend = tokenizers.Tokenizer(model)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if shape.prefix is None:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    else:
        shape.prefix(backend)
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    # Gemma 4 sets the flag, but its template also writes BOS
    default = vocabulary.get("model") != "gemma4"
    return _Built(backend, default and bool(vocabulary.get("add_bos_token", True)))


def _first_space(backend: tokenizers.Tokenizer) -> None:
    """Put a space before a text that does not begin with one."""
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first", split=False)


def _each_space(backend: tokenizers.Tokenizer) -> None:
    """Put a space before the text and after each special token."""
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )


class _SentencePiece(NamedTuple):
    """Properties of a vocabulary that files omit.

    Attributes:
        prefix: Function that puts a space before a text, or None.
        in_order: True if tokens are merged in the order of their ids instead of scores, and tokens
            of several spaces are written with spaces.
    """

    prefix: Callable[[tokenizers.Tokenizer], None] | None = _first_space
    in_order: bool = False


_LLAMA = _SentencePiece()
_GEMMA = _SentencePiece(None, in_order=True)
_SENTENCEPIECE = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), _GEMMA),
    "phi3": _SentencePiece(_each_space),
}
_MODELS: dict[Any, Callable[[GgufVocabulary], _Built]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _sentencepiece,
}


# -- parts -----------------------------------------------------------------------------------------


def _merges(vocabulary: GgufVocabulary) -> Merges:
    """Return the merges of the file. A space can only be the first character of a token."""
    merges: Merges = []
    for merge in vocabulary.get("merges", ()):
        at = merge.find(" ", 1)
        if at < 0:
            raise ValueError(f"the merge {merge!r} is not two tokens")
        merges.append((merge[:at], merge[at + 1 :]))
    return merges


def _merges_of_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> Merges:
    """Return all pairs of tokens that form a token, in SentencePiece's order of scores."""
    pairs = [
        (scores[token_id], len(token[:at]), len(token[at:]), token[:at], token[at:])
        for token, token_id in vocab.items()
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    pairs.sort(key=lambda each: each[:3], reverse=True)  # ties keep the order of the merged ids
    return [(left, right) for *_, left, right in pairs]


# Tokens that are searched for in the original text, as in llama.cpp.
_WHOLE = frozenset({_UNKNOWN, _CONTROL, _USER_DEFINED})


def _add_whole_tokens(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Add tokens that are never split: control tokens (omitted from texts) and user tokens."""
    named = set(vocabulary.special_tokens.values())
    model = backend.get_vocab(with_added_tokens=False)
    special, ordinary = list[AddedToken](), list[AddedToken]()
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if token not in model:  # tokens of spaces, which merges form
            continue
        if kind in (_CONTROL, _UNKNOWN) or token in named:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            ordinary.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(ordinary)


def _add_processor(built: _Built, vocabulary: GgufVocabulary) -> None:
    """Add BOS and EOS around a text if the file requires them."""
    before = [vocabulary.special_tokens.get("bos_token")] if built.adds_bos else []
    wants_eos = bool(vocabulary.get("add_eos_token"))
    after = [vocabulary.special_tokens.get("eos_token")] if wants_eos else []
    names = [each for each in (*before, *after) if each is not None]
    if not names:
        return
    ids = {name: built.backend.token_to_id(name) for name in names}
    single = [*(each for each in before if each), "$A", *(each for each in after if each)]
    built.backend.post_processor = TemplateProcessing(
        single=single, special_tokens=list(ids.items())
    )
