"""Text on both sides of the engine: tokenizer and chat templates."""
