"""`make pictures`: the terminal pictures of the documents. Runs each command in a terminal, saves
what it shows as SVG.

Needs the embedded model `smollm2-135m`, and a system with pseudo-terminals (Linux, macOS).
"""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parents[1] / "docs"
MODEL = "smollm2-135m"
WIDTH, HEIGHT = 96, 50
QUESTION = "What is the capital of France?"
PORT = 8000  # of the server in its picture; it must be free
PROMPT = ">>> "  # what `chat` shows when it waits for a line
COMMAND = [
    sys.executable,
    "-c",
    "from nano_inference.cli import app; app(prog_name='nano-inference')",
]

# name -> the command's arguments, and the lines that are typed
PICTURES: dict[str, tuple[list[str], list[str]]] = {
    "generate": (
        [
            *("generate", MODEL, "-p", QUESTION, "-p", "Why is the sky blue?"),
            *("-n", "2", "--max-tokens", "48", "--temperature", "0.6", "--seed", "1", "--logprobs"),
        ],
        [],
    ),
    "chat": (
        ["chat", MODEL, "--max-tokens", "64", "--temperature", "0"],
        [QUESTION, "And what is it known for?", "/reset", "/exit"],
    ),
    "info": (["info", MODEL], []),
}


def main() -> None:
    for name, (arguments, lines) in PICTURES.items():
        save(
            f"cli-{name}",
            f"nano-inference {' '.join(map(quoted, arguments))}",
            run([*COMMAND, *arguments], lines),
        )
    save("cli-serve", f"nano-inference serve {MODEL} --port {PORT} &", served())
    save("demo", "make demo", run([sys.executable, str(DOCS.parent / "examples" / "demo.py")], []))


def save(name: str, command: str, written: str) -> None:
    shown = screen(written)
    (DOCS / f"{name}.svg").write_text(svg(f"$ {command}", shown), encoding="utf-8")
    print(f"{name}.svg: {len(shown.splitlines())} lines")


def served() -> str:
    """What a server writes until it has answered one request, and that request with its answer."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
    )
    address = f"http://127.0.0.1:{PORT}/v1/chat/completions"
    ours, theirs = terminal()
    command = [*COMMAND, "serve", MODEL, "--port", str(PORT)]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        seen = b""
        while b"max_model_len=" not in seen or not seen.endswith(b"\n"):
            piece = read(ours)
            if not piece:
                raise SystemExit(f"the server ended: {seen.decode(errors='replace')}")
            seen += piece
        with urllib.request.urlopen(address, body.encode(), timeout=60) as reply:
            answer = reply.read().decode()
        process.terminate()
        while read(ours):
            pass
    os.close(ours)
    # without the day
    lines = [line.partition(" ")[2] for line in plain(seen.decode()).splitlines()]
    return "\r\n".join([*lines, "", f"$ curl {address} -d '{body}'", "", answer])


def terminal() -> tuple[int, int]:
    """Both ends of a terminal of WIDTH columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    return ours, theirs


def run(command: list[str], lines: list[str]) -> str:
    """All that a command writes to a terminal of WIDTH columns. Lines are typed when it asks for
    them.
    """
    ours, theirs = terminal()
    unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    environment = {key: value for key, value in os.environ.items() if key not in unset} | {
        "TERM": "xterm-256color"
    }
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        seen = b""
        typed = 0
        while piece := read(ours):
            seen += piece
            if typed < len(lines) and plain(seen.decode(errors="replace")).count(PROMPT) > typed:
                os.write(ours, lines[typed].encode() + b"\n")
                typed += 1
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {seen.decode(errors='replace')}")
    return seen.decode()


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other side was closed
        return b""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def screen(text: str) -> str:
    """What is left on the screen: cursor movements (of spinners and progress bars) obeyed, colours
    kept.
    """
    rows = [""]
    row = 0
    overwrite = False  # the cursor stands at the start of the row
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row, overwrite = row + 1, False
            rows += [""] * (row + 1 - len(rows))
        elif part == "\r":
            overwrite = True
        elif part.endswith("A"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part.endswith("K"):
            rows[row] = ""
        elif part.endswith("m") or not part.startswith("\x1b"):
            rows[row] = part if overwrite else rows[row] + part
            overwrite = False
    return "\n".join(rows).rstrip()


def svg(command: str, shown: str) -> str:
    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        console.print(Text(command, style="bold"), soft_wrap=False)
        console.print()
        console.print(Text.from_ansi(shown))
    # The id must not change from run to run, or every picture differs.
    picture = console.export_svg(title="nano-inference", unique_id="cli")
    # a picture shall fetch nothing from the network
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.S)
    # some viewers drop spaces otherwise
    return picture.replace("<svg ", '<svg xml:space="preserve" ', 1)


def quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word


if __name__ == "__main__":
    main()
