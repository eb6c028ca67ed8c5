"""`python docs/make_house.py`: write docs/house.svg, the path of a request, a token and an update
through the folders, and the table of folders in docs/house.md. A test checks that both are current.
"""

import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "house.svg"
PAGE = ROOT / "docs" / "house.md"
BEGIN, END = "<!-- folders -->\n", "<!-- /folders -->"
# Contents of each room. A room of the import contract that is missing here is an error.
ROOMS = {
    "nano_ray": "replicas as Ray actors, verl",
    "nano_train": "training runs as folders, `runs`",
    "nano_training_service": "LoRA training over HTTP",
    "nano_bench": "load on a server, files of requests, reports",
    "cli": "the command line",
    "server": "HTTP: OpenAI, Anthropic, Ollama, trainers' routes, the page",
    "fleet": "several engines: router, failover, supervisor",
    "remote": "one engine in another process: messages, operations, client",
    "rl": "trainers: `PolicyModel`, replay, scoring, TRL",
    "engine": "the public engine: checks, delivery, updates",
    "ranks": "one engine over several processes",
    "text": "tokenizers, chat templates, detokenizer",
    "drafts": "guesses of the next tokens: by text, model, heads",
    "device": "runner, KV tensors, graphs, sleep",
    "weights": "updates, their sources and transports",
    "checkpoints": "folders, safetensors, quantized formats, GGUF, adapters",
    "models": "families, parameters, the decoder",
    "ops": "operations: `reference`, `cpu`, `cuda`",
    "parallel": "process groups, meshes, segments",
    "core": "a step: schedule, apply, batch, commit, loop",
    "sampling": "noise, filters, masks, logprobs",
    "kv_cache": "blocks, hash cache, radix cache, windows",
    "data": "samples for training",
    "config": "`EngineConfig`",
    "types": "requests, samples, updates",
    "structured": "grammars and their masks",
    "features": "features that cannot be combined",
    "fields": "declared and checked fields of dataclasses",
    "arrays": "arrays of the host with the interface of tensors",
    "system": "processes, files, the processor, progress",
    "errors": "typed errors",
}
WIDTH, HEIGHT = 1000, 620
REQUEST, TOKEN, UPDATE = "#2f62a8", "#2e7d4f", "#b4681a"


class Box(NamedTuple):
    """A folder in the picture."""

    x: int
    y: int
    width: int
    words: str
    height: int = 46


BOXES = {
    "server": Box(20, 100, 960, "protocols, prompts, streams · trainers' routes"),
    "fleet": Box(20, 172, 960, "several engines: router, failover"),
    "remote": Box(20, 244, 960, "messages to and from the engine's process"),
    "engine": Box(20, 322, 610, "checks requests, hands out samples"),
    "weights": Box(690, 322, 290, "receive, check and stage an update"),
    "kv_cache": Box(20, 406, 190, "blocks and their names", 62),
    "core": Box(270, 406, 360, "inbox · schedule · apply · batch · commit", 62),
    "device": Box(20, 528, 215, "runner, KV tensors, graphs"),
    "models": Box(268, 528, 215, "parameters, decoder"),
    "ops": Box(516, 528, 215, "kernels"),
    "sampling": Box(764, 528, 216, "filters, noise, logprobs"),
}
OUTSIDE = {"your client": (20, 20, 290), "your trainer": (690, 20, 290)}
# Corners of each arrow.
ARROWS: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    (REQUEST, ((90, 62), (90, 100))),
    (REQUEST, ((90, 146), (90, 172))),
    (REQUEST, ((90, 218), (90, 244))),
    (REQUEST, ((90, 290), (90, 322))),
    (REQUEST, ((320, 368), (320, 406))),
    (TOKEN, ((300, 468), (300, 498), (127, 498), (127, 528))),
    (TOKEN, ((235, 551), (268, 551))),
    (TOKEN, ((483, 551), (516, 551))),
    (TOKEN, ((731, 551), (764, 551))),
    (TOKEN, ((872, 528), (872, 450), (630, 450))),
    (TOKEN, ((560, 406), (560, 368))),
    (TOKEN, ((250, 322), (250, 290))),
    (TOKEN, ((250, 244), (250, 218))),
    (TOKEN, ((250, 172), (250, 146))),
    (TOKEN, ((250, 100), (250, 62))),
    (UPDATE, ((900, 62), (900, 100))),
    (UPDATE, ((900, 146), (900, 172))),
    (UPDATE, ((900, 218), (900, 244))),
    (UPDATE, ((900, 290), (900, 322))),
    (UPDATE, ((780, 368), (780, 424), (630, 424))),
    (UPDATE, ((420, 468), (420, 528))),
)
NOTES = (
    (REQUEST, 104, 86, "request"),
    (TOKEN, 264, 86, "tokens"),
    (UPDATE, 836, 86, "update"),
    (TOKEN, 136, 514, "one step: a batch of rows"),
    (UPDATE, 430, 514, "between two steps"),
    (TOKEN, 690, 468, "drawn tokens"),
    (UPDATE, 690, 416, "queue"),
)


def layers() -> list[list[str]]:
    """Return the rooms of the import contract, top first. Rooms of one list do not know each
    other.
    """
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    contract = next(
        each for each in contracts if each["type"] == "layers" and len(each["layers"]) > 10
    )
    return [
        [room.strip().removeprefix("nano_inference.") for room in layer.split("|")]
        for layer in contract["layers"]
    ]


def table() -> str:
    """Return the table of folders, top first."""
    rows = ["| Folder or file | Contents |", "| --- | --- |"]
    for room in (room for layer in layers() for room in layer):
        within = "" if room.startswith("nano_") else "nano_inference/"
        path = f"src/{within}{room}"
        path += "/" if (ROOT / path).is_dir() else ".py"
        rows.append(f"| [`{path.removeprefix(f'src/{within}')}`](../{path}) | {ROOMS[room]} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """Return docs/house.md with today's table."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END, 1)[1]


def drawing() -> str:
    """Return the picture."""
    rooms = {room for layer in layers() for room in layer}
    assert rooms.issuperset(BOXES), BOXES.keys() - rooms
    description = (
        "A request goes down from your client through server, fleet, remote and engine to core. Each "
        "step takes a batch of rows from core through device, models, ops and sampling back to core, "
        "whose tokens go up to your client. An update goes down from your trainer through server, "
        "fleet, remote and weights to core, which writes it into the models between two steps."
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" role="img" aria-labelledby="t d"'
        ' font-family="Helvetica, Arial, sans-serif">',
        '<title id="t">The way of a request, a token and an update</title>',
        f'<desc id="d">{escape(description)}</desc>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
    ]
    for name, (x, y, width) in OUTSIDE.items():
        out += [
            f'<rect x="{x}" y="{y}" width="{width}" height="42" rx="21" fill="#f3f4f6"'
            ' stroke="#8a94a0" stroke-width="1.5"/>',
            _text(x + width // 2, y + 27, name, 'font-size="15" text-anchor="middle"'),
        ]
    for name, box in BOXES.items():
        middle = box.y + box.height // 2
        out += [
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"'
            ' fill="#f7f9fc" stroke="#8a94a0" stroke-width="1.5"/>',
            _text(box.x + box.width // 2, middle - 3, f"{name}/", _CENTRED_BOLD),
            _text(box.x + box.width // 2, middle + 14, box.words, _CENTRED),
        ]
    for colour, corners in ARROWS:
        out += _arrow(colour, corners)
    # both read and change it within a decision
    out += [*_arrow(TOKEN, ((236, 437), (270, 437))), *_arrow(TOKEN, ((244, 437), (210, 437)))]
    for colour, x, y, words in NOTES:
        out.append(_text(x, y, words, f'font-size="13" font-style="italic" fill="{colour}"'))
    y = HEIGHT - 18
    for x, colour, words in (
        (20, REQUEST, "a request, once"),
        (330, TOKEN, "a token, in every step"),
        (690, UPDATE, "a weight update, between two steps"),
    ):
        out += [
            f'<path d="M{x} {y - 4} h34" stroke="{colour}" stroke-width="3"/>',
            _text(x + 44, y, words, 'font-size="13" fill="#3b4754"'),
        ]
    return "\n".join([*out, "</svg>"]) + "\n"


_CENTRED_BOLD = 'font-size="15" font-weight="bold" fill="#1d2733" text-anchor="middle"'
_CENTRED = 'font-size="12.5" fill="#3b4754" text-anchor="middle"'


def _text(x: int, y: int, words: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def _arrow(colour: str, corners: Sequence[tuple[int, int]]) -> list[str]:
    """Return a line through the corners, with a head at the last one."""
    (x0, y0), (x, y) = corners[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    left, right = ((x - 9 * dx + side * 5 * dy, y - 9 * dy + side * 5 * dx) for side in (-1, 1))
    line = " L".join(f"{px} {py}" for px, py in [*corners[:-1], (x - 6 * dx, y - 6 * dy)])
    return [
        f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>',
        f'<path d="M{x} {y} L{left[0]} {left[1]} L{right[0]} {right[1]} z" fill="{colour}"/>',
    ]


if __name__ == "__main__":
    TARGET.write_text(drawing())
    PAGE.write_text(page())
