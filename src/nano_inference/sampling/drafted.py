"""Draft tokens of a step."""

from collections.abc import Mapping

# Draft tokens, keyed by sequence id or by the index of the sample that follows them.
Drafts = Mapping[int, tuple[int, ...]]
NO_DRAFTS: Drafts = {}
