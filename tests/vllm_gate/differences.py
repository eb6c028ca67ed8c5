"""Known differences between our server's answers and vLLM's, as docs/differences.md states them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch


@dataclass(frozen=True)
class Difference:
    """Outline lines that may differ.

    Attributes:
        why: Quotation from docs/differences.md.
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
    Difference("set `n` above 1 at temperature 0", ("*/n-greedy",), "[-+] status: .*"),
    Difference("`logit_bias` beyond 100", ("*/bias-over",), "[-+] status: .*"),
    Difference(
        "| `prompt_logprobs` in a stream | in the last chunk.",
        ("*/prompt-logprobs-streamed",),
        "[-+] status: .*",
    ),
    Difference(
        "request all logprobs",
        (
            "*/prompt-logprobs-all",
            "*/logprobs-all",
            "*/top-logprobs-over",
            "completions/logprobs-over",
        ),
        "[-+] status: .*",
    ),
    Difference("`echo` of a chat", ("chat/echo", "chat/stream-echo"), "[-+] status: .*"),
    Difference(
        "`documents` that the template does not render",
        ("chat/documents",),
        "[-+] status: .*",
    ),
    Difference(
        "you get calls in Hermes' format as calls",
        ("chat/tools-auto",),
        "[-+] status: .*",
    ),
    Difference(
        "Every field accepts null as its default.", ("completions/null-fields",), "[-+] status: .*"
    ),
    Difference(
        "send `max_tokens: 0` in a completion to compute only the prompt",
        ("completions/no-tokens",),
        "[-+] status: .*",
    ),
    Difference(
        "`logprobs` of a completion is a number.", ("completions/logprobs-true",), "[-+] status: .*"
    ),
    Difference("omit `sampling_params`", ("generate/no-params",), "[-+] status: .*"),
    Difference("ids outside the vocabulary", ("detokenize/outside",), "[-+] status: .*"),
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
        "You get reasoning under both of its names",
        ("chat/*",),
        r"\+ choices\[\]\.message\.reasoning_content: null",
    ),
    Difference(
        "`refusal` in a chat's logprobs",
        ("chat/*",),
        r"\+ .*logprobs\.refusal: null",
    ),
    Difference(
        "Errors have OpenAI's types and codes. Trainers' routes add SGLang's `success` and "
        "`message`.",
        _ALL,
        r"[-+] (error\.(code|type|param|message)|message|success|detail): .*",
    ),
    Difference(
        "| `rank` in rows of logprobs | null beyond the tokens that you request. In "
        "`prompt_logprobs` it is then one more than the last rank.",
        _ALL,
        r"[-+] .*\brank: .*",
    ),
    Difference(
        "entries have a `token` next to their `token_id`",
        ("generate/*",),
        r"[-+] choices\[\]\.logprobs\.content\[\]\.(token: str|top_logprobs\[\].*)",
    ),
    Difference(
        "`echo` with `logprobs` returns the prompt's logprobs only in `logprobs`.",
        _ECHO,
        r"[-+] (chunks: )?choices\[\]\.prompt_logprobs.*",
    ),
    Difference(
        "The model's messages have the role `assistant`.",
        ("chat/no-generation-prompt",),
        ".* choices.*role: .*",
    ),
    Difference(
        "`/health` and `/ping` have a body.",
        ("health", "ping"),
        "[-+] (body|model_loaded|status): (nothing|bool|str)",
    ),
    Difference(
        "`/v1/models` has no permissions, and a status.",
        ("models",),
        r"- data\[\]\.permission.*|\+ data\[\]\.status.*",
    ),
    # -- streams
    Difference(
        "The chunk that ends a choice has an empty delta, with null in its unused fields.",
        _STREAMS,
        r"\+ chunks: (choices\[\]\.(delta: \{\}|prompt_logprobs: null|routed_experts: null)|"
        r"usage: null)",
    ),
    Difference(
        "You get the prompt's ids if you request them, with or without `echo`.",
        ("completions/stream-echo*",),
        r"[-+] (first chunk|chunks): choices\[\]\.prompt_token_ids: .*",
    ),
    Difference(
        "One chunk may hold several tokens.",
        _STREAMS,
        r"- chunks: (choices\[\]\.(finish_reason|stop_reason|prompt_token_ids): null|"
        r".*top_logprobs\[\]: rows .*)",
        by_chance=True,
    ),
)
