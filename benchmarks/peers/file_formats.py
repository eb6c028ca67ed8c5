"""Weights in 8 and 4 bits compared with llama.cpp on the same GGUF files: for each kind of file,
ours and llama.cpp in turns.

Each kind is a separate pass, so that only a few engines are in memory. If the model's own file is
of a kind, it is used. llama-quantize makes the other files from a bf16 GGUF, so their weights may
have been quantized before.
"""

import hashlib
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import psutil

from benchmarks import models
from benchmarks.formats import TEXT
from benchmarks.measure import Row, console, show, spread
from benchmarks.ours import Options
from benchmarks.peers import install
from benchmarks.peers.compare import OURS, compete, ours, started
from benchmarks.peers.llama_cpp import LlamaServer, gguf_of, perplexity, quantised
from benchmarks.peers.process import Engine, PeerFailed, Worker
from benchmarks.workloads import workload
from nano_inference.checkpoints.embedded import EMBEDDED_MODELS, find_embedded
from nano_inference.checkpoints.loading import resolve_model
from nano_inference.text.tokenizer import load_tokenizer

KINDS = ("BF16", "Q8_0", "Q4_1", "Q4_0", "Q4_K_M", "IQ4_XS", "MXFP4_MOE")
WORKLOADS = ("W1", "W4-512", "W4", "W2")
OWN_FILES = {"smollm2-135m": "Q4_1", "gemma3-270m": "Q4_K_M"}
# our formats of about the same size, measured in the same pass
BESIDE = {"Q8_0": "int8"}
CONTEXT = 512  # tokens per piece of the text; its second half counts, as in llama-perplexity
PIECES = 4
LIMIT = 900.0  # seconds of a workload
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "engine": lambda row: row["engine"],
    "weights": lambda row: row["weights"],
    "MB": lambda row: row["weight_mb"],
    "W1 decode tok/s": lambda row: row.get("decode_tokens_per_s"),
    "W2 tok/s": lambda row: row.get("batch_tokens_per_s"),
    "prompt of 512 tokens, tok/s": lambda row: row.get("prompt_tokens_per_s"),
    "prompt of 4,096 tokens, tok/s": lambda row: row.get("long_prompt_tokens_per_s"),
    "peak MiB": lambda row: row.get("peak_memory_mib"),
    "start to first token, s": lambda row: row["start_to_first_token_s"],
    "perplexity": lambda row: row["perplexity"],
}


@dataclass
class Entry:
    """One engine with weights of one format."""

    engine: str
    weights: str
    begin: Callable[[], Engine]
    weight_bytes: int | None = None  # None: the engine reports it
    tensors: dict[str, int] = field(default_factory=dict[str, int])  # tensors of the file, by type
    perplexity: Callable[[Engine], float | None] = lambda engine: None  # computes that of the text

    @property
    def key(self) -> tuple[str, str]:
        return self.engine, self.weights


@dataclass(frozen=True)
class Sizes:
    """Selection of measurements.

    Attributes:
        kinds: Kinds of files, from `KINDS`.
        workloads: Names from `WORKLOADS`.
        cache: Folder of llama.cpp and of the files.
    """

    kinds: tuple[str, ...] = KINDS
    workloads: tuple[str, ...] = WORKLOADS
    cache: Path = Path()


def measure(options: Options, sizes: Sizes) -> list[Row]:
    """Return a row per engine and kind of file. Without llama.cpp, print the reason and return
    none.
    """
    if install.installed(sizes.cache, "llama.cpp") is None:
        console.print("skipping llama.cpp: it is not installed; run `make peers`.")
        return []
    options = replace(options, threads=options.threads or psutil.cpu_count(logical=False) or 1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        text = Text.of(options.model, Path(folder) / "text")
        for kind in sizes.kinds:
            try:
                entries = entries_of(kind, options, sizes.cache, text)
            except (PeerFailed, OSError) as why:
                console.print(f"skipping {kind}: {why}", markup=False)
                continue
            rows += run(entries, options.repeats, sizes, text.what if text else None)
    show(f"formats against llama.cpp, {options.model}: median [min..max]", COLUMNS, rows)
    return rows


def run(entries: Sequence[Entry], repeats: int, sizes: Sizes, text: str | None) -> list[Row]:
    """Measure the starts of all entries in turns, then the workloads in turns, then the text."""
    starts: dict[tuple[str, str], list[float]] = {entry.key: [] for entry in entries}
    for number in range(repeats):
        for entry in entries:
            with ExitStack() as one:
                engine = started(entry.key, entry.begin, sizes.cache, one)
                try:
                    if engine is not None:
                        starts[entry.key].append(start_seconds(engine, number))
                except (PeerFailed, OSError) as why:
                    console.print(f"{', '.join(entry.key)} failed: {why}", markup=False)
    rows: list[Row] = []
    with ExitStack() as running:
        found = [
            (entry, started(entry.key, entry.begin, sizes.cache, running))
            for entry in entries
            if starts[entry.key]
        ]
        engines = [engine for _, engine in found if engine is not None]
        raced = {name: compete(name, engines, repeats, LIMIT) for name in sizes.workloads}
        for entry, engine in found:
            if engine is None:
                continue
            by_workload = {
                name: row
                for name, of_name in raced.items()
                for row in of_name
                if (row["engine"], row["setting"]) == entry.key
            }
            rows.append(row_of(entry, engine, starts[entry.key], by_workload, text))
    return rows


def start_seconds(engine: Engine, number: int) -> float:
    """Return the seconds from the start of the process to the first token of a prompt of 128."""
    first = workload("W1", 700 + number).cut(1)
    engine.prepare(first)
    assert isinstance(engine, Worker | LlamaServer)
    return engine.load_seconds + engine.run(first)


def row_of(
    entry: Entry, engine: Engine, starts: Sequence[float], raced: dict[str, Row], text: str | None
) -> Row:
    size = entry.weight_bytes or getattr(engine, "weight_bytes", None) or 0
    row: Row = {
        "name": f"{entry.engine}, {entry.weights}",
        "engine": entry.engine,
        "weights": entry.weights,
        "weight_mb": round(size / 1e6, 1),
        "tensors": entry.tensors,
        "start_to_first_token_s": spread(starts),
        "perplexity": told_perplexity(entry, engine),
        "text": text,
        "peak_memory_mib": max((each["peak_memory_mib"] for each in raced.values()), default=None),
        "runs": raced,
    }
    for name, figure, called in (
        ("W1", "decode_tokens_per_s", "decode_tokens_per_s"),
        ("W2", "output_tokens_per_s", "batch_tokens_per_s"),
        ("W4-512", "prompt_tokens_per_s", "prompt_tokens_per_s"),
        ("W4", "prompt_tokens_per_s", "long_prompt_tokens_per_s"),
    ):
        if name in raced:
            row[called] = raced[name][figure]
    return row


def told_perplexity(entry: Entry, engine: Engine) -> float | None:
    try:
        found = entry.perplexity(engine)
    except (PeerFailed, OSError) as why:
        console.print(f"{', '.join(entry.key)} reported no perplexity: {why}", markup=False)
        return None
    return None if found is None else round(found, 3)


def entries_of(kind: str, options: Options, cache: Path, text: "Text | None") -> list[Entry]:
    """Return the engines for files of a kind: llama.cpp, ours on the file's own blocks (or on plain
    weights), and ours with codes of the same size. Raises `PeerFailed`.
    """
    threads, log = options.threads or 1, cache / "logs"
    path = file_of(kind, options.model, cache)
    size, tensors = weights_of(path)
    by_llama = Entry(
        "llama.cpp",
        kind,
        lambda: Named(kind, path, threads, cache, log / "llama.cpp.log"),
        size,
        tensors,
        lambda engine: perplexity(path, text.path, CONTEXT, threads, cache) if text else None,
    )

    def by_ours(weights: str, changes: dict[str, Any]) -> Entry:
        return Entry(
            OURS,
            weights,
            lambda: ours(weights, options, changes, log / f"{OURS}.log"),
            perplexity=lambda engine: scored(engine, text) if text else None,
        )

    if kind == "BF16":
        return [by_ours(options.dtype, {}), by_llama]
    resolve_model(str(path), coded=True)  # makes its tokenizer, once
    mine = [by_ours(kind, {"model_path": str(path), "quantization": "file"})]
    if kind in BESIDE:
        mine.append(by_ours(BESIDE[kind], {"quantization": BESIDE[kind]}))
    return [*mine, by_llama]


class Named(LlamaServer):
    """A llama-server in its default setting, named by its file."""

    def __init__(self, kind: str, path: Path, threads: int, cache: Path, log: Path) -> None:
        super().__init__("own KV", path, threads, cache, log)
        self.setting = kind


def file_of(kind: str, model: str, cache: Path) -> Path:
    """Return a file of a kind: the model's own, or one made by llama.cpp. Raises `PeerFailed`."""
    if OWN_FILES.get(model) == kind and model in EMBEDDED_MODELS:
        return find_embedded(model)
    plain = gguf_of(models.model_path(model), cache)
    return plain if kind == "BF16" else quantised(plain, kind, cache)


def weights_of(path: Path) -> tuple[int, dict[str, int]]:
    """Return the bytes of a file's tensors, and the number of tensors of each type."""
    tensors = gguf.GGUFReader(path).tensors
    kinds = Counter(tensor.tensor_type.name for tensor in tensors)
    return sum(int(tensor.n_bytes) for tensor in tensors), dict(sorted(kinds.items()))


@dataclass(frozen=True)
class Text:
    """A text as llama-perplexity reads it: whole pieces of `CONTEXT` tokens."""

    path: Path
    pieces: tuple[tuple[int, ...], ...]
    what: str

    @classmethod
    def of(cls, model: str, path: Path) -> "Text | None":
        """Return the first pieces of this documentation, or None for a model with
        random weights.
        """
        if model in models.RANDOM:
            return None
        tokenizer = load_tokenizer(models.model_path(model))
        whole = TEXT.read_text("utf-8")
        tokens = tokenizer.encode(whole)[: PIECES * CONTEXT + CONTEXT // 2]
        path.write_text(tokenizer.decode(tokens, skip_special_tokens=False), "utf-8")
        tokens = tokenizer.encode(path.read_text("utf-8"))
        pieces = tuple(tuple(tokens[at * CONTEXT : (at + 1) * CONTEXT]) for at in range(PIECES))
        digest = hashlib.sha256(repr(pieces).encode()).hexdigest()[:12]
        return cls(path, pieces, f"{TEXT.name}, {PIECES} x {CONTEXT} tokens, sha256 {digest}")


def scored(engine: Engine, text: Text) -> float:
    """Return our engine's perplexity of a text, over the same tokens as llama-perplexity."""
    assert isinstance(engine, Worker)
    answer = engine.ask({"score": [list(piece) for piece in text.pieces]})
    return of_second_halves(answer["logprobs"])


def of_second_halves(pieces: Sequence[Sequence[float]]) -> float:
    """Return the perplexity of the tokens after the first one of each piece's second half, as
    llama-perplexity counts.

    Args:
        pieces: Logprobs of each piece's tokens from the second on.
    """
    counted = [value for each in pieces for value in each[(len(each) + 1) // 2 :]]
    return math.exp(-sum(counted) / len(counted))
