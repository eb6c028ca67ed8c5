"""Structured output: grammars, and the tokens that they allow next. No torch here."""
