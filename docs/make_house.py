"""`python docs/make_house.py`: draws docs/house.svg, the folders of the package from the import contract's layers. A test
holds it current.
"""

import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "house.svg"
# Content of each room in a few words. A room of the contract that is missing here is an error.
ROOMS = {
    "nano_ray": "replicas as Ray actors; verl",
    "nano_training_service": "LoRA training over HTTP",
    "nano_bench": "load on any server, batches, reports",
    "cli": "the command line",
    "server": "HTTP: OpenAI, Anthropic, trainers' routes, the page",
    "fleet": "several engines: router, failover, supervisor",
    "remote": "one engine in another process: messages, operations, client",
    "rl": "trainers: PolicyModel, replay, scoring, TRL",
    "engine": "the public engine: lifecycle, intake, delivery, updates",
    "ranks": "one engine over several processes",
    "text": "tokenizers, templates, detokenizer",
    "drafts": "guesses of the next tokens: by text, model, heads",
    "device": "runner, memory of keys and values, graphs, sleep",
    "weights": "updates, their sources and transports",
    "checkpoints": "folders, safetensors, quantised formats, GGUF, adapters",
    "models": "families, parameters, the decoder",
    "ops": "operations: reference, cpu, cuda",
    "parallel": "process groups, meshes, segments",
    "core": "a step: schedule, apply, batch, loop",
    "sampling": "noise, filters, masks, logprobs",
    "kv_cache": "blocks, hash cache, radix cache, windows",
    "data": "samples for training",
    "config": "EngineConfig",
    "types": "requests, samples, updates",
    "structured": "grammars and their masks",
    "features": "what does not go together",
    "fields": "declared and checked fields of dataclasses",
    "system": "processes, files, the processor, progress",
    "errors": "typed errors",
}
WIDTH, ROW, GAP = 1000, 44, 8
COLOURS = (
    ("#e8f0fb", "#2f62a8"),
    ("#e6f4ea", "#2e7d4f"),
    ("#fdefdc", "#b4681a"),
    ("#f3f4f6", "#8a94a0"),
)


def layers() -> list[list[str]]:
    """Return the contract's rooms, top first. Rooms in one list do not import each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    named = next(
        each for each in contracts if each["type"] == "layers" and len(each["layers"]) > 10
    )
    return [
        [room.strip().removeprefix("nano_inference.") for room in layer.split("|")]
        for layer in named["layers"]
    ]


def colour(room: str) -> tuple[str, str]:
    """Return a room's colours: outside blue, decisions green, tensors orange, nouns grey."""
    if room in ("cli", "server", "fleet", "remote", "rl") or room.startswith("nano_"):
        return COLOURS[0]
    if room in ("core", "kv_cache", "structured"):
        return COLOURS[1]
    if room in (
        "engine",
        "ranks",
        "drafts",
        "device",
        "weights",
        "checkpoints",
        "models",
        "text",
        "ops",
        "parallel",
        "sampling",
    ):
        return COLOURS[2]
    return COLOURS[3]


def drawing() -> str:
    """Return the whole picture."""
    rows = layers()
    height = 30 + len(rows) * (ROW + GAP) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' role="img" aria-labelledby="t d" font-family="Helvetica, Arial, sans-serif">',
        '<title id="t">The house</title>',
        f'<desc id="d">{escape("; ".join(" and ".join(row) for row in rows))}: each imports only from below.</desc>',
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>',
    ]
    for number, row in enumerate(rows):
        y, width = 20 + number * (ROW + GAP), (WIDTH - 130 - GAP * (len(row) - 1)) / len(row)
        for place, room in enumerate(row):
            x = 20 + place * (width + GAP)
            fill, stroke = colour(room)
            name, words = (
                room
                if room.startswith("nano_")
                else f"{room}/"
                if (ROOT / "src/nano_inference" / room).is_dir()
                else f"{room}.py",
                ROOMS[room],
            )
            out += [
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{ROW}" rx="6" fill="{fill}" stroke="{stroke}"'
                ' stroke-width="1.5"/>',
                f'<text x="{x + 12:.0f}" y="{y + 19}" font-size="15" font-weight="bold" fill="#1d2733">{name}</text>',
                f'<text x="{x + 12:.0f}" y="{y + 36}" font-size="12.5" fill="#3b4754">{escape(words)}</text>',
            ]
    x, bottom = WIDTH - 60, 20 + len(rows) * (ROW + GAP) - GAP
    out += [
        f'<path d="M{x} 24 V{bottom - 8}" stroke="#44515f" stroke-width="1.6"/>',
        f'<path d="M{x - 6} {bottom - 16} L{x} {bottom - 4} L{x + 6} {bottom - 16} z" fill="#44515f"/>',
        f'<text x="{x + 12}" y="{bottom // 2}" font-size="12.5" font-style="italic" fill="#5a6672"'
        f' transform="rotate(90 {x + 12} {bottom // 2})">imports</text>',
        f'<text x="20" y="{height - 14}" font-size="12.5" fill="#5a6672">blue: outside; orange: tensors; '
        "green: decisions without tensors; grey: nouns</text>",
        "</svg>",
    ]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    TARGET.write_text(drawing())
