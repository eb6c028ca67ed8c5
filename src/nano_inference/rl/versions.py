"""Decoders of an engine's policy by weight version, from the engine's weights and the caller's."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nano_inference.checkpoints.loading import load_params, resolve_model
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import InvalidRequest, WeightUpdateError
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.param import Formats
from nano_inference.models.parameters.storage import allocate, formats_of
from nano_inference.models.parameters.table import param_table
from nano_inference.ops.formats import FILE
from nano_inference.weights.sync import WeightSyncManager

# A caller's weights of versions that the engine does not serve: each a whole state dict or a
# model's folder. A function raises LookupError for unknown versions.
Weights = Mapping[int, Any] | Callable[[int], Any]

# whole copies of the weights in memory; most samples mix at most two versions
MOST_COPIES = 2


class VersionedDecoders:
    """Decoders by weight version that share the engine's tables and operations, but not its KV
    tensors.
    """

    def __init__(self, engine: InferenceEngine, weights: Weights | None = None) -> None:
        self._engine = engine
        self._weights: Weights = {} if weights is None else weights
        # ordered by last use
        self._loaded: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._decoders: dict[int, Decoder] = {}

    def require(self, versions: Iterable[int]) -> None:
        """Raise `InvalidRequest` naming all missing versions.

        If the caller passed a function, `get` checks each version instead.
        """
        if isinstance(self._weights, Mapping):
            serving = self._engine.get_weight_version()
            missing = [
                version
                for version in sorted(set(versions))
                if version not in {serving, *self._weights}
            ]
            if missing:
                raise self._missing(missing)

    def get(self, version: int) -> Decoder:
        """Return the decoder of a version, valid until `renew`.

        The caller's weights take precedence over the engine's.
        """
        if version not in self._decoders:
            self._decoders[version] = self._engine.model.twin(self._params(version))
        if version in self._loaded:
            self._loaded.move_to_end(version)
        return self._decoders[version]

    def renew(self) -> None:
        """Discard the decoders, because KV tensors or the engine's weights have moved.

        Loaded weights are kept.
        """
        self._decoders.clear()

    def _params(self, version: int) -> dict[str, Any] | None:
        """Return the parameters of a version, or None for those that the engine serves."""
        if version in self._loaded:
            return self._loaded[version]
        weights = self._given(version)
        if weights is None and version == self._engine.get_weight_version():
            return None
        if weights is None:
            raise self._missing([version])
        while len(self._loaded) >= MOST_COPIES:
            old, _ = self._loaded.popitem(last=False)
            self._decoders.pop(old, None)
        model = self._engine.model
        quantization = formats_of(model.params)
        if isinstance(weights, str | os.PathLike):
            folder = resolve_model(os.fspath(weights), coded=self._engine.config.codes == FILE)
            self._loaded[version] = load_params(
                *(folder, model.spec, model.dtype, model.device, model.ops.allocate),
                quantization=quantization,
            )
        else:
            self._loaded[version] = _params_of(weights, model, version, quantization)
        return self._loaded[version]

    def _given(self, version: int) -> Any:
        if isinstance(self._weights, Mapping):
            return self._weights.get(version)
        try:
            return self._weights(version)
        except LookupError:
            return None

    def _missing(self, versions: Sequence[int]) -> InvalidRequest:
        names = ", ".join(map(str, versions))
        return InvalidRequest(
            f"the weights of version{'s' if len(versions) > 1 else ''} {names} are missing, and "
            f"the engine serves version {self._engine.get_weight_version()}; pass weights by "
            "version."
        )


def _params_of(weights: Any, model: Decoder, version: int, quantization: Formats) -> dict[str, Any]:
    """Return a state dict as the decoder's parameters.

    Raises `WeightUpdateError` unless it is whole and fits.
    """
    if not isinstance(weights, Mapping):
        raise WeightUpdateError(
            f"the weights of version {version} are a {type(weights).__name__}; pass a state dict "
            "or a model's folder."
        )
    table = param_table(model.spec)
    params = allocate(table, model.dtype, model.device, model.ops.allocate, quantization)
    manager = WeightSyncManager(model.twin(params))
    try:
        manager.stage(weights, copy=False, complete=True)
    except WeightUpdateError as problem:
        raise WeightUpdateError(f"weights of version {version}: {problem}") from problem
    manager.finish()
    return params
