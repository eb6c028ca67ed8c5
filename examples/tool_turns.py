"""A multi-turn `rollout_func` for TRL's `GRPOTrainer`: the model calls a tool, and its answer is
appended without rendering or encoding the past again.

    GRPOTrainer(..., rollout_func=ToolTurns(engine, tool, SamplingParams(max_tokens=64)))
"""

from collections.abc import Callable, Sequence
from typing import Any

from nano_inference import Conversation, InferenceEngine, SamplingParams

Tool = Callable[[str], str | None]  # text of a turn -> the answer, or None if it calls nothing


class ToolTurns:
    """Rollouts of several turns, with TRL's `env_mask`: 1 for sampled tokens, 0 for the tool's.

    Args:
        engine: Engine of the trained model. The trainer's weights must have been sent to it.
        tool: Answers a turn.
        params: Sampling parameters of a turn.
        max_turns: Maximum number of turns.
    """

    def __init__(
        self, engine: InferenceEngine, tool: Tool, params: SamplingParams, max_turns: int = 4
    ) -> None:
        self.engine, self.tool, self.params, self.max_turns = engine, tool, params, max_turns

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return TRL's fields, one entry per prompt. A prompt is a chat."""
        chats = [self.engine.conversation(prompt, on_rewrite="keep") for prompt in prompts]
        starts = [len(chat) for chat in chats]
        open_chats = list(range(len(chats)))
        for _ in range(self.max_turns):
            if not open_chats:
                break
            samples = self.engine.generate([list(chats[at]) for at in open_chats], self.params)
            still_open: list[int] = []
            for at, sample in zip(open_chats, samples, strict=True):
                chats[at] = chats[at].with_sample(sample)
                answer = self.tool(str(chats[at].messages[-1]["content"]))
                if answer is not None and len(chats[at]) + 64 < self.engine.max_model_len:
                    message = {"role": "user", "content": answer}
                    chats[at] = chats[at].with_messages([message])
                    still_open.append(at)
            open_chats = still_open
        return _fields(chats, starts)


def _fields(chats: Sequence[Conversation], starts: Sequence[int]) -> dict[str, list[Any]]:
    """Return the rollouts, each up to its last sampled token."""
    fields: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")
    }
    for chat, start in zip(chats, starts, strict=True):
        end = max(span.end for span in chat.spans if span.author == "model")
        fields["prompt_ids"].append(list(chat.token_ids[:start]))
        fields["completion_ids"].append(list(chat.token_ids[start:end]))
        fields["logprobs"].append(list(chat.logprobs[start:end]))
        fields["env_mask"].append([int(each) for each in chat.loss_mask[start:end]])
    return fields
