"""The HTTP server: OpenAI's and Anthropic's protocols over one engine. Needs the extra `server`."""
