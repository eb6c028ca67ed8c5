"""Decoders of an engine's policy by weight version: the engine's own weights, and those that a
caller brings.
"""

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

# What a caller says of versions that the engine does not serve: each a whole state dict or a
# model's folder. Or a function that gives one, and raises LookupError for a version that it does
# not know.
Weights = Mapping[int, Any] | Callable[[int], Any]

# whole copies of the weights in memory at once; a sample mixes two versions more often than three
MOST_COPIES = 2


class VersionedDecoders:
    """Decoders by weight version, which share the engine's tables and operations but none of its KV
    tensors.
    """

    def __init__(self, engine: InferenceEngine, weights: Weights | None = None) -> None:
        self._engine = engine
        self._weights: Weights = {} if weights is None else weights
        # the one used last at its end
        self._loaded: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._decoders: dict[int, Decoder] = {}

    def require(self, versions: Iterable[int]) -> None:
        """Raise `InvalidRequest` that names all of these versions that are not there. A function is
        asked later.
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
        """The decoder of a version, good until `renew`. Weights that were given go before the
        engine's own.
        """
        if version not in self._decoders:
            self._decoders[version] = self._engine.model.twin(self._params(version))
        if version in self._loaded:
            self._loaded.move_to_end(version)
        return self._decoders[version]

    def renew(self) -> None:
        """Forget the decoders, not the weights that were loaded: KV tensors or the engine's weights
        have moved.
        """
        self._decoders.clear()

    def _params(self, version: int) -> dict[str, Any] | None:
        """The parameters of a version; None: those that the engine serves."""
        if version in self._loaded:
            return self._loaded[version]
        given = self._given(version)
        if given is None and version == self._engine.get_weight_version():
            return None
        if given is None:
            raise self._missing([version])
        while len(self._loaded) >= MOST_COPIES:
            old, _ = self._loaded.popitem(last=False)
            self._decoders.pop(old, None)
        model = self._engine.model
        quantization = formats_of(model.params)
        if isinstance(given, str | os.PathLike):
            folder = resolve_model(os.fspath(given), coded=self._engine.config.codes == FILE)
            self._loaded[version] = load_params(
                *(folder, model.spec, model.dtype, model.device, model.ops.allocate),
                quantization=quantization,
            )
        else:
            self._loaded[version] = _params_of(given, model, version, quantization)
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
            f"the weights of version{'s' if len(versions) > 1 else ''} {names} are needed, were "
            "not given, and the "
            f"engine serves version {self._engine.get_weight_version()}; pass weights by version."
        )


def _params_of(weights: Any, model: Decoder, version: int, quantization: Formats) -> dict[str, Any]:
    """A state dict as the decoder reads it. Raises `WeightUpdateError` unless it is whole and
    fits.
    """
    if not isinstance(weights, Mapping):
        raise WeightUpdateError(
            f"the weights of version {version} are a {type(weights).__name__}; give a state dict "
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
