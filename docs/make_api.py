"""`python docs/make_api.py`: write docs/api.md from the docstrings of the public names. A test
checks that it is current.
"""

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import nano_inference
import nano_inference.data
import nano_inference.rl
from nano_inference.rl import trl
from nano_inference.weights.transports import broadcast, files, interface, lending, sender

TARGET = Path(__file__).parent / "api.md"
GROUPS = {
    "Engines": ("InferenceEngine", "AsyncInferenceEngine", "EngineConfig", "EngineStats"),
    "Requests and results": (
        *(
            "SamplingParams",
            "Grammar",
            "TrainingSample",
            "Delta",
            "TopLogprobs",
            "LogprobMatrix",
            "VersionSpan",
            "ContextVersions",
            "SamplingMask",
            "RoutedExperts",
            "Receipt",
        ),
        *("WeightUpdate", "WeightPatch", "SamplingPipeline", "AdapterInfo", "LoraSettings"),
        *("Conversation", "TokenSpan"),
    ),
    "Parts": (
        *(
            "schedule",
            "SchedulerConfig",
            "SchedulerOutput",
            "Sequence",
            "SequenceStatus",
            "KVCacheManager",
        ),
        *(
            "PagedKVCache",
            "RadixKVCache",
            "CacheAllocation",
            "Block",
            "compute_block_hash",
            "WeightSyncManager",
        ),
        *("model_forward", "sample_with_logprobs"),
    ),
    "Errors": (
        *(
            "NanoInferenceError",
            "ConfigError",
            "ModelLoadError",
            "InvalidRequest",
            "TemplateRewritesPast",
            "LacksMemory",
            "LacksMemoryToWake",
            "RequestTooLarge",
        ),
        *(
            "VersionGone",
            "WeightUpdateError",
            "WeightUpdateConflict",
            "WeightTransferError",
            "RankLost",
            "RequestAborted",
            "EngineDead",
        ),
        *("AdapterError", "AdapterNotFound"),
    ),
}
TRANSPORTS = (
    *(
        files.WeightFolder,
        files.write_folder,
        broadcast.BroadcastReceiver,
        sender.WeightSender,
        lending.lend,
    ),
    interface.WeightTransport,
)
DATA = (
    "pad_samples",
    "to_columns",
    "from_columns",
    "write_jsonl",
    "read_jsonl",
    "write_parquet",
    "read_parquet",
    "sealed",
)


def page() -> str:
    """Return the whole page."""
    lines = ["# API reference", "", "Made from the docstrings by `python docs/make_api.py`.", ""]
    for title, names in GROUPS.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += entry(name, getattr(nano_inference, name))
    lines += ["## nano_inference.rl", "", *paragraphs(nano_inference.rl.__doc__ or "")]
    for name in nano_inference.rl.__all__:
        lines += entry(name, getattr(nano_inference.rl, name))
    lines += entry("trl.RolloutFunction", trl.RolloutFunction)
    lines += ["## Ways of weights", "", "Modules of `nano_inference.weights.transports`.", ""]
    for thing in TRANSPORTS:
        lines += entry(f"{thing.__module__.rpartition('.')[2]}.{thing.__name__}", thing)
    lines += ["## nano_inference.data", "", *paragraphs(nano_inference.data.__doc__ or "")]
    for name in DATA:
        lines += entry(name, getattr(nano_inference.data, name))
    return "\n".join(lines).rstrip() + "\n"


def entry(name: str, thing: Any) -> Iterator[str]:
    """Return the section of a public name."""
    yield from (f"### {name}", "")
    if inspect.isfunction(thing):
        yield from ("```text", f"{name}{signature(thing)}", "```", "")
    elif dataclasses.is_dataclass(thing):
        yield from ("```text", *fields(thing), "```", "")
    yield from paragraphs(inspect.getdoc(thing) or "")
    if inspect.isclass(thing) and not issubclass(thing, Exception | enum.Enum):
        yield from methods(thing)


def methods(cls: type) -> Iterator[str]:
    """Return public methods and properties, including those of our base classes."""
    theirs = {
        name
        for base in cls.__mro__
        if not base.__module__.startswith("nano_inference")
        for name in vars(base)
    }
    ours = {
        name
        for base in cls.__mro__
        if base.__module__.startswith("nano_inference")
        for name in vars(base)
    }
    for name, member in inspect.getmembers(cls):
        if name in theirs - ours:
            continue
        if (
            name.startswith("_")
            or not inspect.getdoc(member)
            or getattr(member, "__module__", "").startswith("builtin")
        ):
            continue
        if inspect.isfunction(member):
            yield from (
                f"**`{name}{signature(member)}`**",
                "",
                *paragraphs(inspect.getdoc(member) or ""),
            )
        elif isinstance(member, property):
            yield from (f"**`{name}`**", "", *paragraphs(inspect.getdoc(member) or ""))


def signature(function: Any) -> str:
    """Return a signature without `self` and without modules in annotations."""
    found = inspect.signature(function)
    kept = [each for p in found.parameters.values() if p.name != "self" for each in unpacked(p)]
    text = str(found.replace(parameters=kept))
    if isinstance(found.return_annotation, str):  # quoted in the source
        text = text.replace(repr(found.return_annotation), found.return_annotation)
    return plain(text).replace("Ellipsis", "...")


def unpacked(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Return a parameter's text. `**options: Unpack[Options]` becomes one entry per option."""
    if get_origin(parameter.annotation) is not Unpack:
        yield parameter
        return
    (options,) = get_args(parameter.annotation)
    for name, kind in get_type_hints(options).items():
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind)


def fields(cls: Any) -> Iterator[str]:
    """Return one line per field."""
    for field in dataclasses.fields(cls):
        kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        yield plain(f"{field.name}: {kind}{default}")


def plain(text: str) -> str:
    """Shorten types to their last names."""
    return re.sub(r"\b(?:[A-Za-z_]+\.)+([A-Za-z_]+)", r"\1", text).replace("'", '"')


def paragraphs(doc: str) -> Iterator[str]:
    """Convert a docstring to markdown. Sections become lists, and continuation lines are joined."""
    item = re.compile(r"^ {4}(\w[\w, ]*): ?(.*)$")
    block: list[str] = []
    for line in [*inspect.cleandoc(doc).splitlines(), ""]:
        found = item.match(line)
        if found:
            yield from flush(block)
            block = [f"- `{found[1]}`: {found[2]}"]
        elif re.match(r"^(Args|Attributes|Returns|Raises|Yields):$", line):
            yield from flush(block)
            block = []
            yield from (f"*{line[:-1]}*", "")
        elif line.strip():
            block.append(line.strip())
        else:
            yield from flush(block)
            block = []
            yield ""


def flush(block: list[str]) -> Iterator[str]:
    """Join the lines of a paragraph. Lines of a table stay."""
    if block and block[0].startswith("|"):
        yield from block
    elif block:
        yield " ".join(block)


def main() -> None:
    """Write the page."""
    text = re.sub(r"\n{3,}", "\n\n", page())
    TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
