"""The tokenizer of a GGUF file, made from what the file says of it and written as Hugging Face's
files.

Only `tokenizer.*` is read: tokens with their types and scores, merges, and the name of the rule by
which text is split. The model's architecture decides nothing but how Gemma and Phi-3 mean a
SentencePiece vocabulary, which their files do not say.
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

# types of tokens, as llama.cpp numbers them
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"  # SentencePiece's
# Hugging Face's names of special tokens, and GGUF's
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
    """What a GGUF file says of its tokenizer.

    Attributes:
        path: of the file.
        architecture: of its model.
        metadata: of the file, lists included.
    """

    path: Path
    architecture: str
    metadata: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `tokenizer.ggml.NAME`."""
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        return default if value is None else value

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return len(self.tokens)

    @property
    def eos_token_id(self) -> int | None:
        """The end of a sequence."""
        return self.get("eos_token_id")

    @cached_property
    def tokens(self) -> list[str]:
        """Texts of all tokens, by their ids; one without a text has a name that no text has."""
        return [
            token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(self.get("tokens", ()))
        ]

    @cached_property
    def types(self) -> list[int]:
        """Of all tokens."""
        return list(self.get("token_type", ())) or [_NORMAL] * self.vocab_size

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` … -> the token's text."""
        ids = {name: self.get(f"{own}_token_id") for name, own in _SPECIAL.items()}
        return {name: self.tokens[each] for name, each in ids.items() if each is not None}

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Jinja sources by their names."""
        named = {
            key.removeprefix("tokenizer.chat_template."): value
            for key, value in self.metadata.items()
            if key.startswith("tokenizer.chat_template.")
        }
        default = self.metadata.get("tokenizer.chat_template")
        return named if default is None else {"default": default, **named}

    @property
    def chat_template(self) -> str | None:
        """The template of chats without tools."""
        return self.chat_templates.get("default")


def read_vocabulary(path: Path) -> GgufVocabulary | None:
    """What the file says of its tokenizer; None: it has none.

    Raises:
        ModelLoadError: the file cannot be read, or contradicts itself.
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
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template of the GGUF file `path`
    into `folder`; nothing where the file has no tokenizer.

    Raises:
        ModelLoadError: the file's tokenizer is of a kind that is not known, or is broken.
    """
    vocabulary = read_vocabulary(path)
    if vocabulary is None:
        return
    build = _MODELS.get(vocabulary.get("model"))
    if build is None:
        raise ModelLoadError(
            f"{path} has a tokenizer of the kind {vocabulary.get('model')!r}; known are "
            f"{', '.join(sorted(_MODELS))}"
        )
    try:
        built = build(vocabulary)
        _add_whole_tokens(built.backend, vocabulary)
        _add_processor(built, vocabulary)
        built.backend.save(str(folder / "tokenizer.json"))
    except (ModelLoadError, OSError):
        raise
    except Exception as problem:  # the library raises bare Exception
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
    """As `write_tokenizer`; a tokenizer that cannot be made leaves its reason, which
    `load_tokenizer` raises. So the model itself loads, and may be given another tokenizer.
    """
    try:
        write_tokenizer(path, folder)
    except ModelLoadError as problem:
        (folder / MISSING_TOKENIZER).write_text(str(problem), encoding="utf-8")


def _broken(path: Path, problem: Exception) -> ModelLoadError:
    return ModelLoadError(f"the tokenizer of {path} is broken: {one_line(problem)}")


def _check(vocabulary: GgufVocabulary) -> None:
    """Raise `ValueError` and the like where the lists contradict each other."""
    tokens = vocabulary.tokens
    for name in ("token_type", "scores"):
        given = vocabulary.get(name)
        if given is not None and len(given) != len(tokens):
            raise ValueError(f"there are {len(tokens)} tokens and {len(given)} of {name}")
    if len(set(tokens)) < len(tokens):
        seen = set[str]()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise ValueError(f"the token {twice!r} is there twice")
    for name in _SPECIAL.values():
        token_id = vocabulary.get(f"{name}_token_id")
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ValueError(f"{name}_token_id is {token_id}, of {len(tokens)} tokens")
    for name, template in vocabulary.chat_templates.items():
        if not isinstance(template, str):
            raise TypeError(f"the chat template {name} is no text")


def _templates(vocabulary: GgufVocabulary, folder: Path) -> dict[str, Any]:
    """Write a single template as a file; several are a list of tokenizer_config.json."""
    named = vocabulary.chat_templates
    if named.keys() == {"default"}:
        (folder / "chat_template.jinja").write_text(named["default"], encoding="utf-8")
        return {}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    return {"chat_template": listed} if listed else {}


# -- the tokenizers --------------------------------------------------------------------------------


class _Built(NamedTuple):
    """A tokenizer, and whether it begins a sequence with BOS."""

    backend: tokenizers.Tokenizer
    adds_bos: bool


def _byte_level(vocabulary: GgufVocabulary) -> _Built:
    """BPE over bytes, each of which is written as a character."""
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
            f"{vocabulary.path} splits text by the rule {name!r} (tokenizer.ggml.pre), which is "
            "not known here"
        )
    return SPLIT_RULES[name]


def _spelled(vocabulary: GgufVocabulary) -> dict[str, int]:
    """Token -> id. An ordinary token in other characters than those of bytes is meant as its
    text.
    """
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
    """BPE over characters, and over bytes for those that are no token."""
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
        raise ValueError("it has neither merges nor scores")
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
    # Gemma 4's flag is set, and its template writes BOS itself
    default = vocabulary.get("model") != "gemma4"
    return _Built(backend, default and bool(vocabulary.get("add_bos_token", True)))


def _first_space(backend: tokenizers.Tokenizer) -> None:
    """A space before the text, if it does not begin with one."""
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first", split=False)


def _each_space(backend: tokenizers.Tokenizer) -> None:
    """A space before the text, and behind each special token."""
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )


class _SentencePiece(NamedTuple):
    """What a file does not say of its vocabulary.

    Attributes:
        prefix: puts a space before a text; None: nothing is.
        in_order: tokens are merged in their order, whatever their scores; and those of several
            spaces are written with spaces.
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
    """The file's. A token may begin with a space, and none has one elsewhere."""
    merges: Merges = []
    for merge in vocabulary.get("merges", ()):
        at = merge.find(" ", 1)
        if at < 0:
            raise ValueError(f"the merge {merge!r} is not two tokens")
        merges.append((merge[:at], merge[at + 1 :]))
    return merges


def _merges_of_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> Merges:
    """All pairs of tokens that make a token, the one with the best score first, as SentencePiece
    merges.
    """
    found = [
        (scores[token_id], len(token[:at]), len(token[at:]), token[:at], token[at:])
        for token, token_id in vocab.items()
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    found.sort(key=lambda each: each[:3], reverse=True)  # equal ones by the id of what they make
    return [(left, right) for *_, left, right in found]


# Tokens that a text is searched for before anything else is done to it. llama.cpp does the same.
_WHOLE = frozenset({_UNKNOWN, _CONTROL, _USER_DEFINED})


def _add_whole_tokens(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Tokens that are never cut: control tokens, which texts leave out, and the user's."""
    named = set(vocabulary.special_tokens.values())
    model = backend.get_vocab(with_added_tokens=False)
    special, ordinary = list[AddedToken](), list[AddedToken]()
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if token not in model:  # of spaces, which merges make
            continue
        if kind in (_CONTROL, _UNKNOWN) or token in named:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            ordinary.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(ordinary)


def _add_processor(built: _Built, vocabulary: GgufVocabulary) -> None:
    """BOS and EOS around a text, where the file wants them."""
    before = [vocabulary.special_tokens.get("bos_token")] if built.adds_bos else []
    wants_eos = bool(vocabulary.get("add_eos_token"))
    behind = [vocabulary.special_tokens.get("eos_token")] if wants_eos else []
    names = [each for each in (*before, *behind) if each is not None]
    if not names:
        return
    ids = {name: built.backend.token_to_id(name) for name in names}
    single = [*(each for each in before if each), "$A", *(each for each in behind if each)]
    built.backend.post_processor = TemplateProcessing(
        single=single, special_tokens=list(ids.items())
    )
