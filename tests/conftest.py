"""Hypothesis profiles: `mutants` reports the first failure without searching for a smaller one."""

from hypothesis import Phase, settings

settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
