# ruff: noqa: RUF001 - these letters are meant
"""Tokenizers of GGUF files, for every architecture and rule, compared with transformers'
tokenizers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.checkpoints.embedded import find_embedded
from nano_inference.checkpoints.gguf.families import FAMILIES
from nano_inference.checkpoints.gguf.file import describe_config, describe_gguf
from nano_inference.checkpoints.gguf.header import read_header
from nano_inference.checkpoints.gguf.splits import SPLIT_RULES
from nano_inference.checkpoints.gguf.tokenizer import read_vocabulary, write_tokenizer_or_reason
from nano_inference.errors import InvalidRequest, ModelLoadError
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints.hf_to_gguf import hf_to_gguf
from tests.checkpoints.test_gguf_families import CASES, strong
from tests.cli.running import run
from tests.models.tiny_gguf import write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ALPHABET = sorted(ByteLevel.alphabet())
# llama.cpp's metadata for models of each architecture
KINDS: Mapping[str, tuple[str, str]] = {
    "deepseek2": ("gpt2", "deepseek-v3"),
    "ernie4_5": ("llama", "default"),
    "exaone4": ("gpt2", "exaone4"),
    "gemma": ("llama", "default"),
    "gemma2": ("llama", "default"),
    "gemma3": ("llama", "default"),
    "glm4": ("gpt2", "glm4"),
    "gpt-oss": ("gpt2", "gpt-4o"),
    "granite": ("gpt2", "refact"),
    "granitemoe": ("gpt2", "refact"),
    "lfm2": ("gpt2", "lfm2"),
    "llama": ("gpt2", "llama-bpe"),
    "mistral3": ("gpt2", "tekken"),
    "olmo2": ("gpt2", "dbrx"),
    "olmoe": ("gpt2", "olmo"),
    "phi3": ("llama", "default"),
    "qwen2": ("gpt2", "qwen2"),
    "qwen2moe": ("gpt2", "qwen2"),
    "qwen3": ("gpt2", "qwen2"),
    "qwen3moe": ("gpt2", "qwen2"),
    "qwen35": ("gpt2", "qwen35"),
    "seed_oss": ("gpt2", "seed-coder"),
    "smollm3": ("gpt2", "llama-bpe"),
}
TEXTS = [
    "Hello world\n\n1. 23456  x",
    "I'm DON'T it'll CamelCaseWords HTTPServer",
    "   \n\t lines \r\n\r\n and  spaces   ",
    "é e\u0301 ‘quotes’ 你好世界 ひらがな 한국어 🙂🇫🇷",
    "$100,000.50 + x_1 == [a, b]; // comment\n    return;",
    "<|im_start|>user\n<|im_end|>",
    "",
]


def tokens_of(tokens: Mapping[str, int], /, **more: Any) -> dict[str, Any]:
    """Return the metadata of a vocabulary. `tokens`: text -> type in id order, best merge first."""
    return {
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(tokens.values()),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def tokenizer_of(
    folder: Path, metadata: Mapping[str, Any], architecture: str = "llama"
) -> Tokenizer:
    path = write_gguf(folder / "m.gguf", {}, metadata, architecture)
    (folder / "tokenizer").mkdir()
    write_tokenizer_or_reason(path, folder / "tokenizer")
    return load_tokenizer(folder / "tokenizer")


def byte_level(*controls: str, pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    tokens = {
        **dict.fromkeys(ALPHABET, NORMAL),
        **dict.fromkeys(["he", "ll", "hell", "Ġhe"], NORMAL),
        **dict.fromkeys(controls, CONTROL),
    }
    merges = ["h e", "l l", "he ll", "Ġ he"]
    return tokens_of(tokens, **{"model": "gpt2", "pre": pre, "merges": merges, **more})


def pieces(**more: Any) -> dict[str, Any]:
    """Return the metadata of a SentencePiece vocabulary."""
    tokens = {
        "<unk>": UNKNOWN,
        "<s>": CONTROL,
        "</s>": CONTROL,
        **{f"<0x{byte:02X}>": BYTE for byte in range(256)},
        **dict.fromkeys(["▁", "▁h", "he", "▁he", "h", "e", "l", "ll"], NORMAL),
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return tokens_of(tokens, **{"model": "llama", "pre": "default", **ids, **more})


def test_tokenizer_kind_exists_for_every_architecture() -> None:
    assert KINDS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("architecture", sorted(KINDS))
def test_file_of_every_architecture_opens_with_its_tokenizer(
    tmp_path: Path, architecture: str
) -> None:
    name = next(name for name, case in CASES.items() if case.architecture == architecture)
    strong(tmp_path / "hf", name)
    kind, pre = KINDS[architecture]
    extra = byte_level("<bos>", "<eos>", pre=pre) if kind == "gpt2" else pieces()
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", architecture, extra=extra)
    tokenizer = load_tokenizer(describe_gguf(path, tmp_path / "cache"))
    tokens = extra["tokenizer.ggml.tokens"]
    assert tokenizer.vocab_size == len(tokens)
    begins_with_a_space = kind == "llama" and architecture not in ("gemma", "gemma2", "gemma3")
    expected = ["▁he" if begins_with_a_space else "he", "ll"] if kind == "llama" else ["hell"]
    assert tokenizer.encode("hell") == [tokens.index(each) for each in expected]
    assert tokenizer.decode(tokenizer.encode("hell é")) == "hell é"


def test_gpt_oss_rope_factors_do_not_affect_its_tokenizer(tmp_path: Path) -> None:
    strong(tmp_path / "hf", "gpt-oss")
    changes: dict[str, Any] = {"rope.scaling.factor": 32.0, "rope.scaling.type": "yarn"}
    changes["rope.scaling.original_context_length"] = 64
    extra = byte_level("<|return|>", pre="gpt-4o")
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "gpt-oss", extra=extra, **changes)
    assert load_tokenizer(describe_gguf(path, tmp_path / "cache")).encode("hell")


# -- comparison with transformers -----------------------------------------------------------------


@pytest.fixture(scope="session")
def smollm2() -> dict[str, Any]:
    """Return SmolLM2's tokenizer metadata."""
    metadata = read_header(find_embedded("smollm2-135m"), token_lists=True).metadata
    return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}


def theirs(path: Path) -> Any:
    """Convert with transformers, which does not read the model's config."""
    gguf = pytest.importorskip("transformers.integrations.gguf")
    architecture, tokenizer, _ = gguf.get_gguf_tokenizer(str(path))
    return gguf.convert_gguf_tokenizer(architecture, tokenizer)[0]


def assert_same_ids(folder: Path, metadata: Mapping[str, Any], architecture: str) -> None:
    ours = tokenizer_of(folder, metadata, architecture)
    other = theirs(folder / "m.gguf")
    for text in TEXTS:
        expected = other.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected, (text, ours.backend.encode(text).tokens)
        assert ours.decode(expected) == other.decode(expected)


@pytest.mark.parametrize(
    "pre", ["llama-bpe", "tekken", "deepseek-r1-qwen", "gpt-4o", "dbrx", "gpt-2", "exaone4"]
)
def test_byte_level_ids_equal_transformers(
    tmp_path: Path, smollm2: dict[str, Any], pre: str
) -> None:
    assert_same_ids(tmp_path, smollm2 | {"tokenizer.ggml.pre": pre}, "llama")


@pytest.mark.parametrize("architecture", ["llama", "ernie4_5", "gemma3", "phi3"])
def test_sentencepiece_ids_equal_transformers(
    tmp_path: Path, smollm2: dict[str, Any], architecture: str
) -> None:
    """Use a vocabulary of real words: decoded byte-level tokens."""
    alphabet = {written: byte for byte, written in enumerate_bytes()}
    words = dict[str, int]()
    for token in smollm2["tokenizer.ggml.tokens"][17:12_000]:
        data = bytes(alphabet[each] for each in token)
        text = data.decode("utf-8", "ignore")
        if text.encode() == data and "\n" not in text:
            words[text.replace(" ", "▁")] = NORMAL
    letters = dict.fromkeys("".join(words), NORMAL)
    specials = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<|im_end|>": CONTROL}
    in_bytes = {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": 2}
    metadata = tokens_of({**specials, **in_bytes, **letters, **words}, model="llama", **ids)
    assert_same_ids(tmp_path, metadata, architecture)


def enumerate_bytes() -> Sequence[tuple[int, str]]:
    """Return each byte and its byte-level character."""
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    plain = [(byte, level.pre_tokenize_str(chr(byte))[0][0]) for byte in range(128)]
    high = [(byte, level.pre_tokenize_str(chr(byte))[0][0][-1]) for byte in range(0x80, 0xC0)]
    taken = {character for _, character in (*plain, *high)}
    rest = [each for each in sorted(ALPHABET, key=ord) if each not in taken]
    latin = [each for each in rest if ord(each) < 0x100]
    return [*plain, *high, *((ord(each), each) for each in latin)]


def test_embedded_model_keeps_its_ids(tmp_path: Path, smollm2: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(tmp_path, smollm2)
    assert tokenizer.encode("<|im_start|>user\nHi 12<|im_end|>") == [
        *(1, 4093, 198, 26843, 216, 33, 34, 2),
    ]


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("llama-bpe", "ab12345 c\n\n1", ["ab", "123", "45", "Ġc", "ĊĊ", "1"]),
        ("qwen2", "ab12 c", ["ab", "1", "2", "Ġc"]),
        ("smollm", "a 12 b\n\n1.", ["a", "Ġ", "1", "2", "Ġb", "ĊĊ", "1", "."]),
        ("refact", "x=12", ["x", "=", "1", "2"]),
        ("gpt-2", "don't 123", ["don", "'t", "Ġ123"]),
        ("exaone4", "don't 123", ["don", "'t", "Ġ123"]),
        ("gpt-4o", "HelloWorld don't/\n", ["Hello", "World", "Ġdon't", "/Ċ"]),
        ("tekken", "HelloWorld don't12", ["Hello", "World", "Ġdon", "'t", "1", "2"]),
        ("deepseek-v3", "x1234你好 b.c", ["x", "123", "4", "ä½łå¥½", "Ġb", ".c"]),
        ("deepseek-llm", "ab 12\nçé", ["ab", "Ġ", "12", "Ċ", "Ã§Ã©"]),
        ("deepseek-coder", "ab, 12", ["ab", ",", "Ġ", "1", "2"]),
        ("seed-coder", "a;\n\n1", ["a", ";", "ĊĊ", "1"]),
        ("glm4", "a1234;\n", ["a", "123", "4", ";Ċ"]),
        ("superbpe", "x 1234567", ["xĠ", "1", "234", "567"]),
        ("viking", "ab cd. 12", ["ab", "Ġcd", ".", "Ġ", "1", "2"]),
        ("bailingmoe", "it's 12", ["it", "'s", "Ġ", "1", "2"]),
        ("falcon", "a.b 1234", ["a", ".", "b", "Ġ", "123", "4"]),
    ],
)
def test_splits_follow_the_rule(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_level(pre=pre))
    assert [
        piece for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    ] == expected


@pytest.mark.parametrize("pre", sorted(SPLIT_RULES))
def test_split_rules_keep_the_whole_text(tmp_path: Path, pre: str) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_level(pre=pre))
    for text in TEXTS:
        if "\u0301" in text and SPLIT_RULES[pre].composes:
            continue
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary_word_is_one_token_without_merges(tmp_path: Path) -> None:
    for pre, whole in (("llama-bpe", True), ("qwen2", False)):
        (tmp_path / pre).mkdir()
        tokenizer = tokenizer_of(tmp_path / pre, byte_level(pre=pre, merges=["h e", "l l"]))
        assert (len(tokenizer.encode("hell")) == 1) is whole


def test_unknown_rule_error_names_a_solution(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"'from-the-future'.*tokenizer_path"):
        tokenizer_of(tmp_path, byte_level(pre="from-the-future"))


def test_unknown_kind_error_names_a_solution(tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"'rwkv'; supported: gemma4, gpt2, llama.*tokenizer_p"
    ):
        tokenizer_of(tmp_path, byte_level(model="rwkv"))


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [
        ("llama-bpe", None, True),
        ("qwen2", None, False),
        ("llama-bpe", False, False),
        ("qwen2", True, True),
    ],
)
def test_bos_is_added_as_the_file_or_its_rule_specifies(
    tmp_path: Path, pre: str, flag: bool | None, adds: bool
) -> None:
    more = {} if flag is None else {"add_bos_token": flag}
    metadata = byte_level("<bos>", pre=pre, bos_token_id=260, **more)
    tokenizer = tokenizer_of(tmp_path, metadata)
    assert (tokenizer.encode("x", add_special_tokens=True)[0] == 260) is adds


def test_eos_is_added_if_the_file_specifies_it(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, pieces(add_eos_token=True))
    assert tokenizer.encode("h", add_special_tokens=True)[::2] == [1, 2]


def test_space_prefix_is_added_unless_the_file_disables_it(tmp_path: Path) -> None:
    for prefix, first in ((True, "▁he"), (False, "he")):
        folder = tmp_path / first
        folder.mkdir()
        metadata = pieces(add_space_prefix=prefix)
        tokenizer = tokenizer_of(folder, metadata)
        assert tokenizer.encode("he") == [metadata["tokenizer.ggml.tokens"].index(first)]
        assert tokenizer.decode(tokenizer.encode("he")) == "he"


# -- tokens that are matched whole ----------------------------------------------------------------

DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]


def test_control_tokens_with_other_characters_keep_their_ids(
    tmp_path: Path, smollm2: dict[str, Any]
) -> None:
    tokens = list(smollm2["tokenizer.ggml.tokens"])
    tokens[1:5] = DEEPSEEK
    renamed = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.pre": "deepseek-r1-qwen",
    }
    tokenizer = tokenizer_of(tmp_path, smollm2 | renamed)
    assert tokenizer.encode("".join(DEEPSEEK)) == [1, 2, 3, 4]
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode([3, 28], skip_special_tokens=True) == tokenizer.decode([28])


@pytest.mark.parametrize("token", ["<thé>", "  ", "<｜tool▁calls▁begin｜>", "\n\n\n"])
def test_user_defined_token_is_atomic_and_visible(tmp_path: Path, token: str) -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"].append(token)
    metadata["tokenizer.ggml.token_type"].append(USER_DEFINED)
    metadata["tokenizer.ggml.scores"].append(0.0)
    tokenizer = tokenizer_of(tmp_path, metadata)
    ids = tokenizer.encode(f"he{token}he")
    assert ids[1:-1] == [len(metadata["tokenizer.ggml.tokens"]) - 1]
    if token != "<thé>":  # its letters would decode as bytes
        assert tokenizer.decode(ids) == f"he{token}he"


def test_ordinary_token_with_other_characters_decodes_to_text(tmp_path: Path) -> None:
    metadata = byte_level(merges=["Î ©"])
    metadata["tokenizer.ggml.tokens"][-1] = "Ω"
    tokenizer = tokenizer_of(tmp_path, metadata)
    assert tokenizer.encode("Ω") == [len(metadata["tokenizer.ggml.tokens"]) - 1]


def test_named_token_is_special_whatever_its_type(tmp_path: Path) -> None:
    metadata = byte_level("<é>")
    metadata["tokenizer.ggml.token_type"] = [NORMAL] * len(metadata["tokenizer.ggml.tokens"])
    end = len(metadata["tokenizer.ggml.tokens"]) - 1
    tokenizer = tokenizer_of(tmp_path, metadata | {"tokenizer.ggml.eos_token_id": end})
    assert tokenizer.encode("<é>") == [end]
    assert tokenizer.decode([end]) == ""


# -- invalid files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": ["h e", "x yz"]}, "out of vocabulary"),
        ({"merges": ["he"]}, "the merge 'he' is not two tokens"),
        ({"token_type": [NORMAL]}, "token_type has 1 entries for 260 tokens"),
        ({"scores": [0.0]}, "scores has 1 entries for 260 tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "scores": [0.0, 0.0]}, "'a' is duplicated"),
        ({"eos_token_id": 260}, "eos_token_id=260 exceeds the 260 tokens"),
        ({"tokens": [1, 2, 3], "token_type": [1, 1, 1], "scores": [0.0] * 3}, ""),
        ({"merges": [1, 2]}, ""),
        ({"tokens": "text"}, ""),
    ],
)
def test_broken_tokenizer_error_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    metadata = byte_level(**changes)
    with pytest.raises(ModelLoadError) as raised:
        tokenizer_of(tmp_path, metadata)
    assert message in str(raised.value)
    assert "tokenizer_path" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_description_does_not_need_the_tokenizer(tmp_path: Path) -> None:
    strong(tmp_path / "hf", "llama")
    extra = byte_level("<eos>", pre="from-the-future", eos_token_id=260)
    extra["tokenizer.chat_template"] = "{{ messages }}"
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "llama", extra=extra)
    folder = describe_config(path, tmp_path / "cache")
    assert not (folder / "tokenizer.json").exists()
    vocabulary = read_vocabulary(path)
    assert vocabulary is not None
    assert (vocabulary.vocab_size, vocabulary.eos_token_id) == (261, 260)
    assert vocabulary.special_tokens["eos_token"] == "<eos>"
    assert vocabulary.chat_template == "{{ messages }}"


def test_info_reports_an_unsupported_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    strong(tmp_path / "hf", "llama")
    extra = byte_level("<eos>", pre="from-the-future", eos_token_id=260)
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "llama", extra=extra)
    result = run("info", str(path), "--json")
    assert result.exit_code == 0, result.output
    reported = json.loads(result.stdout)["tokenizer"]
    assert (reported["vocab_size"], reported["eos_token_id"]) == (261, 260)
    assert not reported["has_chat_template"]
    assert not list((tmp_path / "cache").rglob("tokenizer.json"))
    assert run("info", str(path)).exit_code == 0


def test_unsupported_tokenizer_allows_ids_and_a_replacement(
    tmp_path: Path,
) -> None:
    strong(tmp_path / "hf", "llama")
    extra = byte_level(pre="from-the-future")
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "llama", extra=extra)
    (tmp_path / "other").mkdir()
    tokenizer_of(tmp_path / "other", byte_level("<s>", bos_token_id=0))
    params = SamplingParams(max_tokens=2)
    with InferenceEngine(EngineConfig(str(path))) as engine:
        assert len(engine.generate([[5, 6]], params)[0].completion_tokens) == 2
        with pytest.raises(InvalidRequest, match=r"from-the-future.*set tokenizer_path.* or pass"):
            engine.generate(["x"], params)
    other = str(tmp_path / "other" / "tokenizer")
    with InferenceEngine(EngineConfig(str(path), tokenizer_path=other)) as engine:
        assert engine.tokenizer.encode("hell") == [258]


def test_named_templates_are_kept(tmp_path: Path) -> None:
    metadata = byte_level() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "with tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer_of(tmp_path, metadata)
    config = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())
    named = {each["name"]: each["template"] for each in config["chat_template"]}
    assert named == {"default": "plain", "tool_use": "with tools"}
