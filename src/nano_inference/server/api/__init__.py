"""The protocols of OpenAI and Anthropic.

Imports: server/http, remote, text. Begin with shared/requests.py.
"""
