"""Text on both sides of the engine: tokenizer, chat templates, text of a sample and stop
strings.
"""
