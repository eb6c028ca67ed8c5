"""The tokenizer of a folder, against a tiny byte-level tokenizer built here."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from nano_inference.errors import InvalidRequest, ModelLoadError
from nano_inference.text.chat import encode_chat
from nano_inference.text.tokenizer import LONG, load_tokenizer

CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "model_max_length": 100}

CHAT = [{"role": "user", "content": "a"}]


def write_folder(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """Write a byte-level BPE without merges: 3 special tokens, then one per byte. It adds <s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", "<pad>", *alphabet]
    backend = Backend(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(pad_id=2, pad_token="<pad>", length=8)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


@pytest.mark.parametrize("text", ["", "hello world", "naïve café 🙂 中文", "  two\n\n\tlines "])
def test_round_trip(tmp_path: Path, text: str) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())  # the file's truncation and padding are ignored
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tuple(ids)) == text


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    assert tokenizer.eos_token_id == 1
    assert tokenizer.vocab_size == 3 + 256
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    plain = tokenizer.encode("a")
    assert tokenizer.encode("a", add_special_tokens=True) == [0, *plain]
    assert tokenizer.encode("a</s>") == [*plain, 1]
    assert tokenizer.decode([0, *plain, 1]) == "a"
    assert tokenizer.decode([0, *plain, 1], skip_special_tokens=False) == "<s>a</s>"


def test_partial_character_decodes_to_the_replacement_character(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_special_token_stored_as_an_object(tmp_path: Path) -> None:
    config = {"eos_token": {"__type": "AddedToken", "content": "</s>"}, "bos_token": None}
    tokenizer = load_tokenizer(write_folder(tmp_path, config))
    assert tokenizer.eos_token_id == 1
    assert tokenizer.special_tokens == {"eos_token": "</s>"}


def test_tokenizer_without_end_of_sequence_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, {}))
    assert tokenizer.eos_token_id is None


def test_chat_template_sources(tmp_path: Path) -> None:
    assert load_tokenizer(write_folder(tmp_path)).chat_template is None
    assert load_tokenizer(write_folder(tmp_path, {"chat_template": "one"})).chat_template == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert load_tokenizer(write_folder(tmp_path, {"chat_template": named})).chat_template == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert load_tokenizer(tmp_path).chat_template == "four"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_or_malformed_file_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path)
    (tmp_path / name).write_text("{ not json")
    with pytest.raises(ModelLoadError, match=name):
        load_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ModelLoadError, match=f"the tokenizer file .*{name} is missing"):
        load_tokenizer(tmp_path)


def test_configuration_that_is_not_an_object(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="must hold a JSON object, not a list"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template",
    [5, {"a": "b"}, [{"name": "default"}], ["one"], [{"name": "default", "template": 5}]],
)
def test_missing_chat_template_is_named(tmp_path: Path, template: Any) -> None:
    with pytest.raises(ModelLoadError, match="cannot read the chat template of"):
        load_tokenizer(write_folder(tmp_path, {"chat_template": template}))


def test_chat_template_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match="cannot read the chat template of"):
        load_tokenizer(write_folder(tmp_path))


def test_templates_for_tools_are_chosen_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    def check(default: str | None, tools: str | None) -> None:
        ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
        tool = {"type": "function", "function": {"name": "a", "parameters": {}}}
        for given, expected in (([], default), ([tool], tools)):
            if expected is None:
                with pytest.raises(InvalidRequest, match="chat template"):
                    encode_chat(ours, CHAT, tools=given)
            else:
                assert ours.decode(encode_chat(ours, CHAT, tools=given)) == expected
                said = theirs.apply_chat_template(CHAT, tools=given or None, tokenize=False)
                assert said == expected

    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    write_folder(tmp_path, {"chat_template": named})
    check("three", "two")
    write_folder(tmp_path, {"chat_template": named[:1]})
    check(None, "two")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("four")
    check(None, "four")  # files override all of the config
    (tmp_path / "chat_template.jinja").write_text("five")
    check("five", "four")
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
    check("five", "five")


def test_template_of_a_processor(tmp_path: Path) -> None:
    """Read the template from the processor's file, as vision models store it."""
    write_folder(tmp_path, {})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "one"}))
    assert load_tokenizer(tmp_path).chat_template == "one"
    write_folder(tmp_path, {"chat_template": "two"})
    assert load_tokenizer(tmp_path).chat_template == "two"


LISTED = {"content": "<|extra|>", "special": False, "normalized": False}
DECODER = {"0": {"content": "<s>", "special": True}, "259": LISTED}


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": DECODER}, {}),
        ({"added_tokens_decoder": {**DECODER, "900": {**LISTED, "content": "<|far|>"}}}, {}),
        ({"additional_special_tokens": ["<|extra|>", "<|far|>"]}, {}),
        ({"extra_special_tokens": ["<|extra|>"]}, {}),
        ({"extra_special_tokens": [{**LISTED, "__type": "AddedToken"}]}, {}),
        ({"extra_special_tokens": {"a_token": "<|far|>", "b_token": "<|extra|>"}}, {}),
        ({"pad_token": "<|extra|>", "mask_token": "<|far|>"}, {}),
        ({"image_token": "<|extra|>"}, {}),
        ({}, {"added_tokens.json": {"<|far|>": 260, "<|extra|>": 259}}),
        ({}, {"special_tokens_map.json": {"pad_token": "<|extra|>"}}),
        ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<|extra|>"]}}),
        (
            {"added_tokens_decoder": DECODER},
            {"added_tokens.json": {"<|far|>": 260}, "special_tokens_map.json": {"x_token": "<x>"}},
        ),
        (
            {"additional_special_tokens": ["<|far|>"]},
            {"added_tokens.json": {"<|extra|>": 259, "<|far|>": 260}},
        ),
        ({"eos_token": "<|extra|>"}, {}),
    ],
)
def test_tokens_next_to_tokenizer_json_match_transformers(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    write_folder(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", **CONFIG, **config})
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert len(ours.encode("a<|extra|>b")) == 3
    for text in ("a<|extra|>b", "a<|far|>b <x>", "<|extra|><|far|></s>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": LISTED}},
        {"added_tokens_decoder": {"300": "<|extra|>"}},
        {"extra_special_tokens": 5},
    ],
)
def test_invalid_added_tokens_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="cannot read the added tokens of"):
        load_tokenizer(write_folder(tmp_path, config))


@pytest.mark.thorough
def test_transformers_is_not_imported() -> None:
    code = "import sys, nano_inference.text.chat; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.thorough(cases=["False"])
@pytest.mark.parametrize("add", [False, True])
def test_long_texts_are_the_same_ids(tmp_path: Path, add: bool) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    for text in ("naïve café 🙂 中文</s>" * LONG, "x" * LONG, "x" * (LONG + 1)):
        assert (
            tokenizer.encode(text, add)
            == tokenizer.backend.encode(text, add_special_tokens=add).ids
        )


@pytest.mark.thorough
def test_encoding_a_long_text_blocks_no_other_thread(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    turns, ended = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            time.sleep(0)

    beside = threading.Thread(target=take_turns)
    beside.start()
    try:
        before = turns
        tokenizer.backend.encode_batch_fast(["warm up"])
        tokenizer.encode("👨‍👩‍👧‍👦" * 40_000)
        assert turns - before > 50  # one or two without contention
    finally:
        ended.set()
        beside.join()
