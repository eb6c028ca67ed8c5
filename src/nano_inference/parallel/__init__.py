"""How ranks share one model: their places, and what they tell each other."""
