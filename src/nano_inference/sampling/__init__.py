"""From logits to tokens: noise, filters, the draw, logprobs. Plain torch; every row for itself."""
