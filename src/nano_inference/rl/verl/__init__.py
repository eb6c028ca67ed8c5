"""The engine as a rollout of verl, on Ray: `actor_rollout_ref.rollout.name=nano`.

`plugin` is what verl loads; `replica`, `server_actor` and `adapter` are classes of verl's and
Ray's; all else needs neither.
"""
