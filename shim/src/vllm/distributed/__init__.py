"""Groups of a trainer and its servers."""
