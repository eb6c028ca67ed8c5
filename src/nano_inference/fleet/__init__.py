"""Several engines served as one: router, failover, supervisor, joint updates.

Imports only from: core, drafts, kv_cache, remote.
Begin with: fleet_client.py, then router.py.
Tests: tests/fleet.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.fleet.errors import FleetError as FleetError
    from nano_inference.fleet.fleet_client import FleetClient as FleetClient

_MODULES = {
    "FleetClient": "fleet_client",
    "FleetError": "errors",
}
__getattr__ = lazy(__name__, _MODULES)
