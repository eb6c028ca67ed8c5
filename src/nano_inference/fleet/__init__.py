"""Several engines behind one client: router, failover, supervisor, updates of all.

Imports only from: remote.
Begin with: fleet_client.py, then router.py.
Tests: tests/fleet.
"""
