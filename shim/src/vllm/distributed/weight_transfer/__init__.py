"""Trainer's half of the weight transfer."""
