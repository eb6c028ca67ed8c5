"""Helpers of vLLM that TRL imports."""
