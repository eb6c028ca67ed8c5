"""Drafts: guesses of the next tokens, which change no token and no bit, and only save time."""
