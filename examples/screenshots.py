"""`make pictures`: the terminal pictures of the documents, or those that you name. Runs each command
in a terminal and saves the screen as SVG. Each file contains a digest of the code that it shows, which a test compares.

Requires the embedded model `smollm2-135m`, and a system with pseudo-terminals (Linux, macOS).
"""

import ast
import fcntl
import hashlib
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = "src/nano_inference/"
MODEL = "smollm2-135m"
# code that determines the sampled tokens, which all pictures show
BITS = (
    f"{PACKAGE}ops/cpu/backend.py:VERSION",
    f"{PACKAGE}checkpoints/gguf/file.py:CONVERTER_VERSION",
)
WIDTH, HEIGHT = 96, 50
QUESTION = "What is 2+2?"
PORT = 8000  # of the server in its picture; the port must be free
PROMPT = ">>> "  # the prompt of `chat`
PYTHON = "python"  # the interpreter that runs this file
COMMAND = (PYTHON, "-c", "from nano_inference.cli import app; app(prog_name='nano-inference')")

BODY = json.dumps(
    {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
)
ADDRESS = f"http://127.0.0.1:{PORT}/v1/chat/completions"


class Picture(NamedTuple):
    """A picture of a terminal.

    Attributes:
        command: Command as shown.
        program: Arguments of the process that writes the picture.
        lines: Lines to type at its prompts.
        sources: Code that writes the output: a file, or names in it ("FILE:NAME,NAME").
    """

    command: str
    program: tuple[str, ...]
    lines: tuple[str, ...]
    sources: tuple[str, ...]


def cli(arguments: tuple[str, ...], lines: tuple[str, ...], *sources: str) -> Picture:
    """Return a picture of a `nano-inference` command."""
    command = f"nano-inference {' '.join(map(quoted, arguments))}"
    return Picture(
        command, (*COMMAND, *arguments), lines, (*(PACKAGE + each for each in sources), *BITS)
    )


def quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word


PICTURES = {
    "cli-generate": cli(
        (
            *("generate", MODEL, "-p", QUESTION, "-p", "Why is the sky blue?"),
            *("-n", "2", "--max-tokens", "48", "--temperature", "0.6", "--seed", "1", "--logprobs"),
        ),
        (),
        "cli/generate.py:_show,_prompt_heading,_heading,_figures,_text",
        "cli/prompts.py:title",
        "cli/terminal.py:legend,colored,_pieces",
    ),
    "cli-chat": cli(
        ("chat", MODEL, "--max-tokens", "64", "--temperature", "0"),
        (QUESTION, "And 2+3?", "/clear", "/exit"),
        "cli/conversation.py:Session,figures",
    ),
    "cli-info": cli(("info", MODEL), (), "cli/info.py"),
    "cli-serve": cli(
        ("serve", MODEL, "--port", str(PORT), "&"),
        (f"curl {ADDRESS} -d '{BODY}'",),
        "device/backends.py:start_up_line",
        "device/memory.py:MemoryBudget",
        "remote/log_lines.py:TextLines,ShortLines",
        "server/api/openai/chat_answer.py:response,_finished,_choice",
        "server/runner.py:log_start",
        "server/hosted.py:log_ready",
        "server/server.py:farewell,Server",
    ),
    "demo": Picture(
        "make demo",
        (PYTHON, str(Path("examples", "demo.py"))),
        (),
        ("examples/demo.py", f"{PACKAGE}device/memory.py:MemoryBudget", *BITS),
    ),
    "from-llama-cpp": Picture(
        "python -m examples.from_llama_cpp",
        (PYTHON, "-m", "examples.from_llama_cpp"),
        (),
        ("examples/from_llama_cpp.py", *BITS),
    ),
}


def digest_of(picture: Picture) -> str:
    """Return a digest of a picture's code without comments and docstrings. A test compares the
    digest to find outdated pictures without making them again.
    """
    parts = [repr(picture), str(WIDTH)]
    for source in picture.sources:
        file, _, names = source.partition(":")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        nodes = [named(tree, name) for name in names.split(",")] if names else [tree]
        parts += [word for node in nodes for word in words(node)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def named(tree: ast.Module, name: str) -> ast.AST:
    """Return the first function, class or assignment of this name. Raises `LookupError`."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        for target in targets:
            if name in (getattr(target, "name", None), getattr(target, "id", None)):
                return node
    raise LookupError(name)


def words(node: ast.AST) -> Iterator[str]:
    """Return a syntax tree as words that are equal for all Python versions."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    yield type(node).__name__
    for _, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from words(each)
            elif each is not None:
                yield repr(each)


def shown_digest(name: str) -> str:
    """Return the digest in a picture on disk. Empty if there is none."""
    found = re.search(r"<metadata>(\w+)</metadata>", (DOCS / f"{name}.svg").read_text("utf-8"))
    return found.group(1) if found else ""


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        picture = PICTURES[name]
        written = served() if name == "cli-serve" else run(picture.program, picture.lines)
        shown = screen(written)
        text = svg(f"$ {picture.command}", shown, digest_of(picture))
        (DOCS / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"{name}.svg: {len(shown.splitlines())} lines")


def served() -> str:
    """Return a server's output until it has answered one request, and the request with its reply."""
    (asked,) = PICTURES["cli-serve"].lines
    ours, theirs = terminal()
    command = PICTURES["cli-serve"].program[:-1]
    with subprocess.Popen(
        argv(command), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        seen = b""
        while b"Ready: " not in seen or not seen.endswith(b"\n"):
            piece = read(ours)
            if not piece:
                raise SystemExit(f"the server ended: {seen.decode(errors='replace')}")
            seen += piece
        with urllib.request.urlopen(ADDRESS, BODY.encode(), timeout=60) as reply:
            answer = reply.read().decode()
        process.terminate()
        while read(ours):
            pass
    os.close(ours)
    lines = plain(screen(seen.decode())).splitlines()  # without the line that shows the loading
    return "\r\n".join([*lines, "", f"$ {asked}", "", answer])


def terminal() -> tuple[int, int]:
    """Open a terminal of WIDTH columns and return both ends."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    return ours, theirs


def argv(program: tuple[str, ...]) -> list[str]:
    return [sys.executable if word == PYTHON else word for word in program]


def run(program: tuple[str, ...], lines: tuple[str, ...]) -> str:
    """Run a command in a terminal of WIDTH columns and return its output. `lines` are typed at its
    prompts.
    """
    ours, theirs = terminal()
    unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    environment = {key: value for key, value in os.environ.items() if key not in unset} | {
        "TERM": "xterm-256color"
    }
    with subprocess.Popen(
        argv(program),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
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
        raise SystemExit(f"{' '.join(program)} failed: {seen.decode(errors='replace')}")
    return seen.decode()


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux reports the closed other end this way
        return b""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def screen(text: str) -> str:
    """Return the final screen, with colors, after all cursor movements of spinners and bars."""
    rows = [""]
    row = 0
    overwrite = False  # the cursor is at the start of the row
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row, overwrite = row + 1, False
            rows += [""] * (row + 1 - len(rows))
        elif part == "\r":
            overwrite = True
        elif part[0] != "\x1b" or part[-1] == "m":
            rows[row] = part if overwrite else rows[row] + part
            overwrite = False
        elif part[-1] == "A":
            row = max(0, row - int(part[2:-1] or 1))
        elif part[-1] == "K":
            rows[row] = ""
    return "\n".join(rows).rstrip()


def svg(command: str, shown: str, digest: str) -> str:
    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        console.print(Text(command, style="bold"), soft_wrap=False)
        console.print()
        console.print(Text.from_ansi(shown))
    # The id must not change from run to run, or every picture differs.
    picture = console.export_svg(title="nano-inference", unique_id="cli")
    # pictures must not load anything from the network
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.S)
    picture = picture.replace("</svg>", f"<metadata>{digest}</metadata>\n</svg>")
    # some viewers drop spaces otherwise
    return picture.replace("<svg ", '<svg xml:space="preserve" ', 1)


if __name__ == "__main__":
    main()
