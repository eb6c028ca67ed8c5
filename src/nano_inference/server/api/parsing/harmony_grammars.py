"""Grammar of an answer in harmony (gpt-oss) that is a call, or may be one."""

from collections.abc import Mapping, Sequence

from nano_inference.errors import InvalidRequest
from nano_inference.server.api.parsing.tool_formats import NAME
from nano_inference.structured.structural_tag import ANYTHING, literal

_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
_MOST_BEFORE = 3  # messages of reasoning and commentary before a call


def harmony_lines(
    calls: Sequence[tuple[str, str]], final: str | None, ids: Mapping[str, int], prompt_tail: str
) -> list[str]:
    """Return the lines of a grammar.

    Args:
        calls: Names of tools, and parts of rules for their arguments.
        final: Part of a rule for an answer without calls. None: the answer is a call.
        ids: Ids of the tokenizer's added tokens.
        prompt_tail: End of the prompt.

    Raises:
        InvalidRequest: The prompt does not end where a message begins, the tokenizer lacks a
            marker, or a header cannot carry a name.
    """
    if not prompt_tail.endswith("<|start|>assistant") or not all(each in ids for each in _TOKENS):
        raise InvalidRequest(
            "tool calls in the format harmony cannot be forced in the middle of a message, or "
            "without its special tokens; leave the choice to the model."
        )
    start, channel, message, constrain, end = (f"<[{ids[each]}]>" for each in _TOKENS)
    lines = [
        f"TEXT: {ANYTHING}",
        f'before: {channel} ("analysis" | "commentary") {message} TEXT {end} {start} "assistant"',
    ]
    answers = list[str]()
    for number, (name, arguments) in enumerate(calls):
        if not NAME.fullmatch(name):
            raise InvalidRequest(
                f"calls in the format harmony cannot carry the name {name!r} of a tool; use "
                "letters, digits, - and _."
            )
        head = literal(f"commentary to=functions.{name} ")
        lines.append(f'call_{number}: {channel} {head} {constrain} "json" {message} {arguments}')
        answers.append(f"call_{number}")
    if final is not None:
        lines.append(f'final: {channel} "final" {message} {final}')
        answers.append("final")
    return [f"start: before{{0,{_MOST_BEFORE}}} ({' | '.join(answers)})", *lines]
