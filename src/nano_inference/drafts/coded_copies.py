"""`CodedCopies`: quantized copies of the policy's weights for drafts."""

from collections.abc import Callable, Mapping
from typing import Any

from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.storage import form_of, numbers_of


class CodedCopies:
    """Quantized copies of the policy's weights, updated with the policy.

    Args:
        policy: Model to copy.
        params: Its parameters by name, some of them quantized copies (`coded_copies`).
        version: Function that returns the version of the policy's weights.
    """

    def __init__(
        self, policy: Decoder, params: Mapping[str, Any], version: Callable[[], int]
    ) -> None:
        self.params = params
        self._version, self._copied = version, version()  # already copied by `coded_copies`
        self._copies = [
            (policy.params[name], copy)
            for name, copy in params.items()
            if copy is not policy.params.get(name) and form_of(copy) is not None
        ]

    def follow(self) -> None:
        """Quantize the policy's weights again if they have changed."""
        version = self._version()
        if version != self._copied:
            self.write()
            self._copied = version

    def write(self) -> None:
        """Quantize the policy's weights again."""
        for weight, copy in self._copies:
            copy.write(0, numbers_of(weight))
