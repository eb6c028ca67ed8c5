"""All control routes by dialect, and their access levels."""

from collections.abc import Mapping, Sequence

from nano_inference.server.control.requests import pipeline_rl, prime_rl, sglang, shared, vllm
from nano_inference.server.control.requests.field_types import Access, Route

DIALECTS: Mapping[str, Sequence[Route]] = {
    "vLLM": vllm.ROUTES,
    "SGLang": sglang.ROUTES,
    "Both": shared.ROUTES,
    "prime-rl": (*prime_rl.ROUTES, prime_rl.UPDATE),
    "PipelineRL": pipeline_rl.ROUTES,
}
ROUTES: Sequence[Route] = tuple(route for routes in DIALECTS.values() for route in routes)


def paths_for(access: Access) -> frozenset[str]:
    """Return the paths with this access level."""
    return frozenset(route.path for route in ROUTES if route.access == access)
