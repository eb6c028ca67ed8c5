"""The edge of the server: connections, limits, keys, admission, replies, metrics, tracing.

Begin with: layers.py.
Tests: tests/server/http.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.server.http.connection import connection_class as connection_class
    from nano_inference.server.http.layers import host_name as host_name
    from nano_inference.server.http.layers import is_address as is_address

_MODULES = {
    "connection_class": "connection",
    "host_name": "layers",
    "is_address": "layers",
}
__getattr__ = lazy(__name__, _MODULES)
