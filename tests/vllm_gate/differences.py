"""Known differences between our server's answers and vLLM's, with reasons. The table in
docs/differences.md has each reason.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch


@dataclass(frozen=True)
class Difference:
    """Outline lines that may differ.

    Attributes:
        why: Reason, in the words of docs/differences.md.
        cases: Shell patterns of case names.
        line: Regular expression of the whole line. The line begins with `- ` if only vLLM has it,
            with `+ ` if only we have it.
        by_chance: True if the line may be missing, because it depends on timing.
    """

    why: str
    cases: tuple[str, ...]
    line: str = ".*"
    by_chance: bool = False

    def concerns(self, case: str) -> bool:
        """True if a case of this name may differ."""
        return any(fnmatch(case, each) for each in self.cases)

    def covers(self, case: str, line: str) -> bool:
        """True if this difference explains this line of this case."""
        return self.concerns(case) and re.fullmatch(self.line, line) is not None


def differing(theirs: Sequence[str], ours: Sequence[str]) -> list[str]:
    """Return the lines that only one of two outlines has. If the statuses differ, return only
    those.
    """
    pairs = [(theirs[:1], ours[:1]), (theirs, ours)]
    for one, other in pairs:
        lines = [f"- {line}" for line in one if line not in other] + [
            f"+ {line}" for line in other if line not in one
        ]
        if lines:
            return lines
    return []


_ALL = ("*",)
_STREAMS = ("*/stream*",)
_ECHO = ("completions/echo-*logprobs*",)

DIFFERENCES = (
    # -- other answers
    Difference("`n` may be above 1 at temperature 0.", ("*/n-greedy",), "[-+] status: .*"),
    Difference("`bad_words` is rejected.", ("*/bad-words",), "[-+] status: .*"),
    Difference("`logit_bias` beyond 100 is rejected.", ("*/bias-over",), "[-+] status: .*"),
    Difference(
        "`prompt_logprobs` in a stream come in its last chunk.",
        ("*/prompt-logprobs-streamed",),
        "[-+] status: .*",
    ),
    Difference(
        "With `--rl`, you may request all logprobs.",
        (
            "*/prompt-logprobs-all",
            "*/logprobs-all",
            "*/top-logprobs-over",
            "completions/logprobs-over",
        ),
        "[-+] status: .*",
    ),
    Difference(
        "`echo` of a chat is rejected.", ("chat/echo", "chat/stream-echo"), "[-+] status: .*"
    ),
    Difference(
        "`documents` are rejected if the template renders none.",
        ("chat/documents",),
        "[-+] status: .*",
    ),
    Difference(
        "Calls of a model without a known call format are read as Hermes writes them.",
        ("chat/tools-auto",),
        "[-+] status: .*",
    ),
    Difference(
        "Null is the default of every field.", ("completions/null-fields",), "[-+] status: .*"
    ),
    Difference(
        "`max_tokens: 0` of a completion computes the prompt alone.",
        ("completions/no-tokens",),
        "[-+] status: .*",
    ),
    Difference(
        "`logprobs` of a completion is a number.", ("completions/logprobs-true",), "[-+] status: .*"
    ),
    Difference("You may omit `sampling_params`.", ("generate/no-params",), "[-+] status: .*"),
    Difference(
        "Ids outside the vocabulary are rejected.", ("detokenize/outside",), "[-+] status: .*"
    ),
    # -- fields
    Difference(
        "Choices have `seed`, `weight_version` and `weight_versions`.",
        _ALL,
        r"\+ (chunks: )?choices\[\]\.(seed|weight_version|weight_versions\[\]\..*): .*",
    ),
    Difference(
        "`usage` always has the cached tokens.",
        _ALL,
        r"[-+] (chunks: )?usage\.prompt_tokens_details(: null|\.cached_tokens: int)",
    ),
    Difference(
        "Fields of unsupported features are omitted.",
        _ALL,
        r"- (chunks: )?(ec_transfer_params|metrics|service_tier|prompt_text|mm_placeholders|"
        r"prompt_token_id_logprobs"
        r"|choices\[\]\.message\.(annotations|audio|function_call)|"
        r"usage\.completion_tokens_details): null",
    ),
    Difference(
        "Reasoning has both its names.",
        ("chat/*",),
        r"\+ choices\[\]\.message\.reasoning_content: null",
    ),
    Difference(
        "Logprobs of a chat have a `refusal`, like OpenAI's.",
        ("chat/*",),
        r"\+ .*logprobs\.refusal: null",
    ),
    Difference(
        "Errors have OpenAI's types and codes; trainers' routes add SGLang's `success` and "
        "`message`.",
        _ALL,
        r"[-+] (error\.(code|type|param|message)|message|success|detail): .*",
    ),
    Difference(
        "`rank` is null beyond the tokens that were asked for; in `prompt_logprobs` it is one behind "
        "the last of them",
        _ALL,
        r"[-+] .*\brank: .*",
    ),
    Difference(
        "Entries of `/inference/v1/generate` have a `token` beside their `token_id`.",
        ("generate/*",),
        r"[-+] choices\[\]\.logprobs\.content\[\]\.(token: str|top_logprobs\[\].*)",
    ),
    Difference(
        "`echo` with `logprobs` tells those of the prompt there alone.",
        _ECHO,
        r"[-+] (chunks: )?choices\[\]\.prompt_logprobs.*",
    ),
    Difference(
        "What a model writes has the role of the assistant.",
        ("chat/no-generation-prompt",),
        ".* choices.*role: .*",
    ),
    Difference(
        "`/health` and `/ping` have a body.",
        ("health", "ping"),
        "[-+] (body|model_loaded|status): (nothing|bool|str)",
    ),
    Difference("`/v1/models` has no permissions.", ("models",), r"- data\[\]\.permission.*"),
    # -- streams
    Difference(
        "The chunk that ends a choice has an empty delta, and nulls where there is nothing to "
        "tell.",
        _STREAMS,
        r"\+ chunks: (choices\[\]\.(delta: \{\}|prompt_logprobs: null|routed_experts: null)|"
        r"usage: null)",
    ),
    Difference(
        "The prompt's ids are told where they are asked for, `echo` or not.",
        ("completions/stream-echo*",),
        r"[-+] (first chunk|chunks): choices\[\]\.prompt_token_ids: .*",
    ),
    Difference(
        "Several tokens may come in one chunk.",
        _STREAMS,
        r"- chunks: (choices\[\]\.(finish_reason|stop_reason|prompt_token_ids): null|"
        r".*top_logprobs\[\]: rows .*)",
        by_chance=True,
    ),
)
