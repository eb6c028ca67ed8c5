"""The engine as a rollout of verl, on Ray: `actor_rollout_ref.rollout.name=nano`.

verl loads `plugin`. `replica`, `actor` and `adapter` import verl and Ray; the other modules need
neither package.
"""
