"""Thoughts in requests: their budget, the template's switch, and thoughts of earlier turns."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.errors import bad_request
from nano_inference.text.call_shapes import REASONING
from nano_inference.text.thought_markers import markers_of

# names of `thinking_token_budget` in llama.cpp's chats and completions and in Qwen's API
BUDGETS = ("thinking_budget_tokens", "reasoning_budget_tokens", "thinking_budget")
BUDGET = "thinking_token_budget"
# what becomes of the thoughts in earlier turns
History = Literal["keep", "strip"]
# variables by which templates keep the thoughts of earlier turns
_KEEPING: Mapping[str, bool] = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "keep_thinking": True,
    "truncate_history_thinking": False,
}


def take_budget(options: dict[str, Any], within: str = "") -> None:
    """Replace the fields in `BUDGETS` by `thinking_token_budget`. -1 in them means no limit. Raises
    `ApiError` 400 if two fields differ.
    """
    budgets = {name: options.pop(name) for name in (BUDGET, *BUDGETS) if name in options}
    if len(set(budgets.values())) > 1:
        raise bad_request(
            f"{within}{' and '.join(budgets)} contradict each other; give only one.",
            within + next(iter(budgets)),
        )
    if (budget := next(iter(budgets.values()), -1)) >= 0:
        options[BUDGET] = budget


def fitting_budget(budget: int | None, max_tokens: int, served: Served) -> int | None:
    """Return a budget of Anthropic's, lowered so that the closing marker and an answer fit. It may
    exceed `max_tokens` there. None: no limit, or the model has no thoughts.
    """
    if budget is None or served.tokenizer is None:
        return None
    markers = markers_of(served.tokenizer)
    if markers is None:
        return None
    most = max_tokens - len(served.tokenizer.encode(markers.end)) - 1
    return min(budget, most) if most >= 0 else None


def with_history(
    messages: Sequence[Mapping[str, Any]],
    history: History | None,
    served: Served,
    kwargs: Mapping[str, Any],
) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    """Return the messages and the template's variables that keep or strip earlier thoughts. None:
    the template decides.
    """
    if history == "strip":
        messages = [
            {name: value for name, value in each.items() if name not in REASONING}
            for each in messages
        ]
    if history != "keep" or served.tokenizer is None:
        return messages, dict(kwargs)
    template = served.tokenizer.chat_template or ""
    switches = {name: value for name, value in _KEEPING.items() if name in template}
    return messages, switches | dict(kwargs)


def require_kept(
    messages: Sequence[Mapping[str, Any]], token_ids: Sequence[int], served: Served
) -> None:
    """Raise `ApiError` 400 unless the prompt holds the thoughts of all messages, in order."""
    assert served.tokenizer is not None
    text, at = served.tokenizer.decode(token_ids, skip_special_tokens=False), 0
    for index, message in enumerate(messages):
        thought = str(message.get("reasoning_content") or "").strip()
        start = text.find(thought, at)
        if start < 0:
            raise bad_request(
                f"reasoning_history is keep, but the model's chat template drops the reasoning of "
                f"messages.{index}; omit reasoning_history, or set chat_template_kwargs that keep "
                "it.",
                "reasoning_history",
            )
        at = start + len(thought)
