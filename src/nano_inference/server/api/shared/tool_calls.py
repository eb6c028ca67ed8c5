"""The grammar of a request that says how tools are called."""

from collections.abc import Sequence
from dataclasses import replace

from nano_inference.errors import InvalidRequest
from nano_inference.server.api.parsing import ChatFormat
from nano_inference.server.api.parsing.tool_grammars import ToolDemand, tool_grammar
from nano_inference.server.api.shared.conversations import tail_of
from nano_inference.server.api.shared.generation import Ask, Served
from nano_inference.server.api.shared.grammars import check
from nano_inference.server.errors import bad_request

# of a model whose own way is not known: a grammar makes any model write it, and some write it by
# themselves
_DEFAULT = "hermes"


def call_format(demand: ToolDemand | None, served: Served) -> ChatFormat:
    """How the answers to a request write calls: as the model does, or, where that is not known, as
    Hermes does.
    """
    format = served.chat_format
    unknown = format.tools is None and not format.in_channels
    if unknown and demand is not None and served.config.tool_format is None:
        return replace(format, tools=_DEFAULT)
    return format


def with_calls(
    asks: Sequence[Ask], demand: ToolDemand | None, served: Served, *, goes_on: bool
) -> list[Ask]:
    """The same asks, under a grammar of tool calls where the demand needs one. Where an answer may
    be text, and the request has a schema for it, that is a part of the grammar.

    Args:
        asks: of one prompt each.
        demand: None: no tool may be called.
        served: knows how the model writes.
        goes_on: the prompt ends with the beginning of the answer.

    Raises:
        ApiError: 400, calls cannot be made sure of.
    """
    if demand is None:
        return list(asks)
    return [_with_calls(ask, demand, served, goes_on) for ask in asks]


def _with_calls(ask: Ask, demand: ToolDemand, served: Served, goes_on: bool) -> Ask:
    content, format = ask.params.grammar, call_format(demand, served)
    if format is not served.chat_format:  # nothing has taught the model where to stop
        demand = replace(demand, parallel=False)
    if not demand.forced:
        no_calls = served.chat_format.tools is None  # all that it says is text
        if no_calls or (content is None and not any(tool.strict for tool in demand.tools)):
            return ask
    if content is not None and content.kind != "json":
        if not demand.forced:
            return ask
        raise bad_request(
            f"a call of a tool is forced, and a {content.kind} grammar as well; give one.",
            "tool_choice",
        )
    assert served.tokenizer is not None
    try:
        grammar = tool_grammar(
            demand,
            format,
            served.tokenizer,
            prompt_tail=tail_of(ask.prompt, served),
            goes_on=goes_on,
            content=content,
        )
        check(grammar, served.engine.grammar_backend)
    except InvalidRequest as problem:
        name = "tool_choice" if format.tools is None else "tools"
        raise bad_request(f"{name}: {problem}", name) from None
    return replace(ask, params=replace(ask.params, grammar=grammar))
