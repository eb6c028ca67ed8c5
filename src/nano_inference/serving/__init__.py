"""The HTTP server: the protocols of OpenAI and Anthropic over one engine."""
