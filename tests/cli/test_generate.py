"""`nano-inference generate` on tiny models: its output on stdout and stderr."""

import io
import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.cli import generate as command
from nano_inference.cli import terminal
from nano_inference.cli.prompts import read_prompts
from nano_inference.cli.terminal import Interruptible
from nano_inference.config import EngineConfig
from nano_inference.data import read_jsonl
from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.system import progress
from tests.cli.running import COLOR, FAST, finish, run, samples, spawn, write_tokenizer
from tests.models.tiny import tiny_llama
from tests.server.adapters import adapter_folder


@pytest.mark.parametrize(("prompts", "samples", "most"), [(1, 1, 4), (3, 2, 6), (2, 200, 256)])
def test_generate_plans_memory_for_its_number_of_sequences(
    monkeypatch: pytest.MonkeyPatch, prompts: int, samples: int, most: int
) -> None:
    """Give the KV cache no more than the requested number of longest sequences can use."""
    asked: list[EngineConfig] = []

    def load(config: EngineConfig) -> InferenceEngine:
        asked.append(config)
        raise ConfigError("that is enough.")

    monkeypatch.setattr("nano_inference.cli.generate.load_engine", load)
    given = [each for _ in range(prompts) for each in ("-p", "hi")]
    run("generate", "smollm2-135m", *given, "-n", str(samples))
    assert [each.max_batch_size for each in asked] == [most]


def test_json_holds_the_samples_of_the_engine(folders: dict[str, str]) -> None:
    sampling = (
        "--temperature",
        "0.9",
        "--top-p",
        "0.95",
        "--top-k",
        "20",
        "--seed",
        "5",
        "--max-tokens",
        "6",
    )
    result = run(
        "generate", folders["base"], "-p", "ab", "-p", "cde", "-n", "2", "--json", *sampling, *FAST
    )
    assert result.exit_code == 0, result.stderr
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=20, seed=5, max_tokens=6)
    config = EngineConfig(model_path=folders["base"], num_threads=1, kv_cache_memory=2**23)
    with InferenceEngine(config) as engine:
        expected = engine.generate(["ab", "cde"], params, 2)
    read = samples(result.stdout)
    assert [tuple(sample["completion_tokens"]) for sample in read] == [
        each.completion_tokens for each in expected
    ]
    # no digit is lost
    assert [tuple(sample["logprobs"]) for sample in read] == [each.logprobs for each in expected]
    assert [sample["text"] for sample in read] == [each.text for each in expected]
    assert all(TrainingSample(**sample) for sample in read)
    assert re.search(
        r"4 samples, 24 tokens in .* tok/s; 0 of 5 prompt tokens cached", result.stderr
    )


def test_single_sample_is_written_as_it_grows_to_a_pipe(folders: dict[str, str]) -> None:
    process = spawn("generate", folders["base"], "-p", "x", "-m", "50000", "--threads", "1")
    assert process.stdout is not None
    assert process.stdout.read(1)  # long before the last token
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "Interrupted" in err


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ((0, 1, 12, 0.3), "12 tokens, 40 tok/s"),
        ((2, 8, 3400, 2), "2 of 8 samples, 3,400 tokens, 1,700 tok/s"),
    ],
)
def test_progress_is_for_people(state: tuple[int, int, int, float], line: str) -> None:
    assert command._progress(*state) == line


def test_schema_may_be_given_as_json(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", seed=0)  # has an end token
    write_tokenizer(model, None)
    schema = '{"enum": [12, 345]}'
    asked = ("generate", str(model), "-p", "ab", "-m", "90", "--seed", "1", *FAST)
    result = run(*asked, "--json-schema", schema)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() in ("12", "345")
    wrong = run(*asked, "--json-schema", '{"type": ')
    assert (wrong.exit_code, "--json-schema: " in wrong.stderr) == (2, True)
    missing = run(*asked, "--json-schema", "no.json")
    assert (missing.exit_code, "no.json: no such file" in missing.stderr) == (2, True)


def test_adapter_is_loaded_and_used(folders: dict[str, str], tmp_path: Path) -> None:
    folder = adapter_folder(Path(folders["base"]), tmp_path / "own", 1)
    asked = (
        "generate",
        folders["base"],
        "-p",
        "ab",
        "--json",
        "-t",
        "1",
        "--seed",
        "5",
        "-m",
        "6",
        *FAST,
    )
    result = run(*asked, "--lora", f"own={folder}", "--adapter", "own")
    assert result.exit_code == 0, result.stderr
    config = EngineConfig(folders["base"], num_threads=1, kv_cache_memory=2**23, max_loras=1)
    with InferenceEngine(config) as engine:
        engine.load_adapter("own", folder)
        (expected,) = engine.generate(["ab"], SamplingParams(seed=5, max_tokens=6, adapter="own"))
    (read,) = samples(result.stdout)
    assert tuple(read["logprobs"]) == expected.logprobs
    assert read["adapter_versions"] == [{"version": 1, "start": 0, "end": 6}]
    assert samples(run(*asked).stdout)[0]["completion_tokens"] != read["completion_tokens"]
    wrong = run(*asked, "--lora", f"own={folder}", "--adapter", "other")
    assert (wrong.exit_code, "--adapter other is not loaded" in wrong.stderr) == (2, True)


def test_sampling_options_arrive(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []

    def remember(self: Any, prompts: Any, params: SamplingParams, *_: Any, **__: Any) -> Any:
        seen.append(params)
        raise InvalidRequest("enough")

    monkeypatch.setattr(InferenceEngine, "generate", remember)
    asked = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 3,
        "min_p": 0.125,
        "max_tokens": 9,
        "min_tokens": 2,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "top_logprobs": 4,
    }
    words = [
        part
        for name, value in asked.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    words += ["--stop", "ab", "--stop", "\n", "--stop-token-id", "9", "--ignore-eos", "--json"]
    assert run("generate", folders["chat"], "-p", "x", *words, *FAST).exit_code == 2
    assert seen == [
        SamplingParams(**asked, stop=("ab", "\n"), stop_token_ids=frozenset([9]), ignore_eos=True)
    ]


@pytest.mark.parametrize(
    ("model", "flags", "prompt"),
    [
        ("chat", [], "<user>hi</user><assistant>"),
        ("chat", ["--chat"], "<user>hi</user><assistant>"),
        ("chat", ["--no-chat"], "hi"),
        ("base", [], "hi"),
    ],
)
def test_chat_template_is_used_if_present(
    folders: dict[str, str], model: str, flags: list[str], prompt: str
) -> None:
    result = run("generate", folders[model], "-p", "hi", "-m", "1", "--json", *flags, *FAST)
    tokenizer = Tokenizer.from_file(f"{folders['base']}/tokenizer.json")
    assert samples(result.stdout)[0]["prompt_tokens"] == tokenizer.encode(prompt).ids


def test_template_that_is_missing_is_an_error(folders: dict[str, str]) -> None:
    result = run("generate", folders["base"], "-p", "hi", "--chat", *FAST)
    assert result.exit_code == 2
    assert "has no chat template" in result.stderr


def test_prompts_of_files(folders: dict[str, str], tmp_path: Path) -> None:
    lines = [
        {"prompt": "a\u2028b"},
        {"prompt": [5, 6]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8"
    )
    assert read_prompts(file) == ["a\u2028b", [5, 6], lines[2]["messages"]]
    result = run(
        "generate", folders["chat"], "-p", "first", "-f", str(file), "-m", "2", "--json", *FAST
    )
    assert [len(sample["completion_tokens"]) for sample in samples(result.stdout)] == [2] * 4
    assert samples(result.stdout)[2]["prompt_tokens"] == [5, 6]

    piped = run(
        "generate",
        folders["base"],
        "--file",
        "-",
        "-m",
        "2",
        "--json",
        *FAST,
        stdin="one\r\n\n two\n",
    )
    tokenizer = Tokenizer.from_file(f"{folders['base']}/tokenizer.json")
    assert [s["prompt_tokens"] for s in samples(piped.stdout)] == [
        tokenizer.encode(text).ids for text in ("one", " two")
    ]


@pytest.mark.parametrize(
    "line",
    [
        *(
            "{",
            "[]",
            "3",
            "{}",
            '{"prompt": ""}',
            '{"prompt": 3}',
            '{"prompt": [1.5]}',
            '{"prompt": [true]}',
        ),
        *(
            '{"prompt": "a", "messages": []}',
            '{"messages": "hi"}',
            '{"messages": []}',
            '{"messages": [1]}',
        ),
        pytest.param("[" * 100_000, id="nested without an end"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(InvalidRequest, match=r"prompts\.jsonl, line 3"):
        read_prompts(file)


def test_files_without_prompts_or_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name, words in (("empty.txt", "has no prompts"), ("binary.txt", "UTF-8")):
        with pytest.raises(InvalidRequest, match=words):
            read_prompts(tmp_path / name)


def test_single_sample_is_only_text_and_several_have_headings(
    folders: dict[str, str],
) -> None:
    few = ("--max-tokens", "8", "--seed", "3", "-t", "1", *FAST)
    with InferenceEngine(
        EngineConfig(model_path=folders["base"], num_threads=1, kv_cache_memory=2**23)
    ) as engine:
        expected = [s.text for s in engine.generate("ab", SamplingParams(max_tokens=8, seed=3), 2)]
    assert run("generate", folders["base"], "-p", "ab", *few).stdout == f"{expected[0]}\n"
    out = run("generate", folders["base"], "-p", "ab", "-n", "2", *few).stdout
    assert out.startswith("prompt  ab\n\nsample 1  8 tokens, length, mean logprob -")
    assert all(f"\n{text}\n" in out for text in expected)


def test_ids_without_a_tokenizer(folders: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text('{"prompt": [5, 6, 7]}')
    result = run("generate", folders["bare"], "-f", str(file), "-m", "3", *FAST)
    assert re.fullmatch(r"\d+ \d+ \d+\n", result.stdout)
    text = run("generate", folders["bare"], "-p", "hi", *FAST)
    assert text.exit_code == 2
    assert "needs a tokenizer" in text.stderr
    borrowed = run(
        "generate", folders["bare"], "--tokenizer", folders["base"], "-p", "hi", "-m", "3", *FAST
    )
    assert borrowed.exit_code == 0


def test_reference_logprobs(folders: dict[str, str]) -> None:
    words = [
        "generate",
        folders["base"],
        "--ref-model",
        folders["base"],
        "-p",
        "ab",
        "-m",
        "3",
        "-t",
        "1",
        *FAST,
    ]
    sample = samples(run(*words, "--json").stdout)[0]
    assert sample["ref_logprobs"] == sample["logprobs"]
    assert re.search(r"mean logprob (-\S+), reference \1", run(*words, "-n", "2").stdout)


@pytest.mark.thorough
def test_logprobs_are_colors_on_a_terminal_and_numbers_elsewhere(folders: dict[str, str]) -> None:
    words = [
        "generate",
        folders["base"],
        "-p",
        "ab",
        "-m",
        "24",
        "--seed",
        "1",
        "--logprobs",
        *FAST,
    ]
    _, colors, _ = finish(spawn(*words, FORCE_COLOR="1"))
    _, plain, _ = finish(spawn(*words, FORCE_COLOR="1", NO_COLOR="1"))
    _, piped, _ = finish(spawn(*words))
    assert COLOR.search(colors)
    assert "probability of a token" in colors
    assert "48;5;228" in colors, "backgrounds come with a foreground of their own"
    for out in (plain, piped):
        assert not COLOR.search(out)
        assert out.startswith("A logprob follows each token.")
        assert len(re.findall(r"\[-\d+\.\d\d\]", out)) > 5


def test_logprob_that_rounds_to_zero_has_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_pieces", lambda *_: [("a", -0.001), ("b", -0.02)])
    plain: Any = Console(file=io.StringIO())
    nothing: Any = None
    assert terminal.colored(nothing, nothing, plain).plain == "a[0.00]b[-0.02]"


@pytest.mark.thorough
def test_errors_respect_no_color() -> None:
    words = ("info", "pyproject.toml")
    assert COLOR.search(finish(spawn(*words, FORCE_COLOR="1"))[2])
    assert not COLOR.search(finish(spawn(*words, FORCE_COLOR="1", NO_COLOR="1"))[2])


def test_model_cannot_send_control_sequences_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nano_inference.cli import terminal

    assert terminal.printable("\x1b[2Ja\tb\n") == "\x1b[2Ja\tb\n"
    monkeypatch.setattr(type(terminal.output), "is_terminal", True)
    assert terminal.printable("\x1b[2Ja\tb\r\n\x9b") == "\ufffd[2Ja\tb\ufffd\n\ufffd"


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [["--json"], [], ["--logprobs"]])
def test_closed_pipe_is_not_reported(folders: dict[str, str], flags: list[str]) -> None:
    process = spawn("generate", folders["base"], "-p", "a", "-n", "200", "-m", "20", *flags, *FAST)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=60)
    assert "Traceback" not in err
    assert "Broken" not in err
    process.stderr.close()
    assert process.stdin is not None
    process.stdin.close()


def test_verbose_shows_engine_logs_and_warnings_always_show(
    folders: dict[str, str],
) -> None:
    words = [
        "generate",
        folders["base"],
        "-p",
        "a",
        "-m",
        "2",
        "--max-model-len",
        "50000",
        "--threads",
        "1",
    ]
    words += ["--kv-cache-memory", "64KiB"]
    quiet, loud = run(*words).stderr, run(*words, "-v").stderr
    assert "WARNING" in quiet
    assert "max_model_len=50000 is lowered" in " ".join(quiet.split())
    assert "memory on cpu" not in quiet
    assert "memory on cpu" in loud


@pytest.mark.thorough
def test_interrupt_ends_a_run_quietly(folders: dict[str, str]) -> None:
    process = spawn(
        "generate", folders["base"], "-p", "a", "-m", "50000", "--json", "--threads", "1", "-v"
    )
    assert process.stderr is not None
    while "longest sequence" not in process.stderr.readline():
        pass  # next come the weights, then the run
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out == ""


def test_interrupt_keeps_finished_samples(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = InferenceEngine.generate

    def interrupted(
        self: Any, prompts: Any, params: SamplingParams, *rest: Any, **named: Any
    ) -> Any:
        each = [replace(params, max_tokens=count) for count in (30, 3, 30)]
        deltas: Any = generate(self, prompts, each, *rest, **named)
        for delta in deltas:
            if delta.finished is not None:
                signal.raise_signal(signal.SIGINT)
            yield delta

    monkeypatch.setattr(InferenceEngine, "generate", interrupted)
    result = run("generate", folders["base"], "-p", "long", "-p", "short", "-p", "longer", *FAST)
    assert result.exit_code == 130
    assert result.stdout.startswith("prompt 2 of 3  short\n\nsample 1  3 tokens")
    assert "prompt 3" not in result.stdout
    assert "Interrupted: finished 1 of 3 samples." in result.stderr


def test_first_interrupt_waits_for_the_next_delta(folders: dict[str, str]) -> None:
    config = EngineConfig(model_path=folders["base"], num_threads=1, kv_cache_memory=2**23)
    before = signal.getsignal(signal.SIGINT)
    with InferenceEngine(config) as engine:
        with Interruptible(
            engine.generate("ab", SamplingParams(max_tokens=1000), stream=True)
        ) as deltas:
            seen = 0
            for _ in deltas:
                seen += 1
                if seen == 3:
                    signal.raise_signal(signal.SIGINT)
        assert deltas.stopped
        assert seen == 3
        assert not engine.has_pending(), "the request is aborted"
        assert signal.getsignal(signal.SIGINT) is before
        assert len(engine.generate("ab", SamplingParams(max_tokens=4))) == 1


def test_json_of_a_run_reads_back_as_samples(folders: dict[str, str], tmp_path: Path) -> None:
    result = run(
        "generate", folders["base"], "-p", "ab", "-n", "3", "--json", "--top-logprobs", "2", *FAST
    )
    file = tmp_path / "samples.jsonl"
    file.write_text(result.stdout)
    back = read_jsonl(file)
    assert [sample.sample_index for sample in back] == [0, 1, 2]
    assert all(
        sample.top_logprobs and len(sample.top_logprobs) == len(sample.logprobs) for sample in back
    )


def test_completions_follow_a_grammar(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", seed=0)  # has an end token
    write_tokenizer(model, None)
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [12, 345]}')
    cases = {
        ("--json-schema", str(schema)): {"12", "345"},
        ("--regex", "yes|no"): {"yes", "no"},
        ("--choice", "left", "--choice", "right"): {"left", "right"},
    }
    for options, possible in cases.items():
        result = run(
            *("generate", str(model), "-p", "ab", "-n", "4", "--json", "--seed", "1"),
            *("--max-tokens", "90"),
            *(*options, *FAST),
        )
        assert result.exit_code == 0, result.stderr
        read = samples(result.stdout)
        assert {each["finish_reason"] for each in read} == {"stop"}
        assert {each["text"].strip() for each in read} <= possible, options


def test_invalid_grammars_are_rejected(folders: dict[str, str], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"uniqueItems": true}')
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for options, said in {
        ("--regex", "a", "--choice", "b"): "--regex and --choice exclude each other",
        ("--json-schema", str(schema)): "uniqueItems",
        ("--json-schema", str(tmp_path / "none")): "no such file.",
        ("--json-schema", str(broken)): "broken.json: the text of a json grammar is not valid JSON",
        ("--regex", "("): "the regex grammar cannot be enforced: unclosed group.",
    }.items():
        result = run("generate", folders["base"], "-p", "ab", *options, *FAST)
        assert result.exit_code != 0
        assert said in " ".join(re.sub("[│╭╰─╮╯]", "", result.stderr).split()), result.stderr


def test_sample_that_failed_says_why(folders: dict[str, str]) -> None:
    """Print an answer or an error on stderr, never nothing."""
    result = run("generate", folders["base"], "-p", "ab", "--regex", "(a{9}){9}", *FAST)
    assert result.exit_code == 0
    assert result.stdout.strip() or "error:" in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--regex", "(ab", "unclosed group"),
        ("--json-schema", '{"type": "objekt"}', "Invalid type: objekt"),
    ],
)
def test_grammar_that_cannot_be_enforced_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, option: str, value: str, reason: str
) -> None:
    monkeypatch.setattr("nano_inference.cli.generate.load_engine", None)  # nothing is loaded
    result = run("generate", "smollm2-135m", "-p", "hi", option, value)
    assert result.exit_code == 2
    assert reason in result.output


def test_build_of_kernels_is_reported_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    hear = terminal._builds(lambda: now[0])  # pyright: ignore[reportPrivateUsage]
    for seconds in (0, 1, 29, 30, 31, 61):
        now[0] = seconds
        hear(f"compiling CPU kernels (once): {seconds} of 99 files")
        hear("loading a model")
    assert [line.split()[-4] for line in capsys.readouterr().err.splitlines()] == [
        "0",
        "30",
        "61",
    ]


def test_loading_hears_of_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(terminal, "_builds", lambda: heard.append)
    with terminal.errors.status("loading") as status, terminal._shown_in(status):  # pyright: ignore
        progress.say("compiling")
    assert heard == ["compiling"]
