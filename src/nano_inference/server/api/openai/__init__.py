"""OpenAI: chat completions, completions, responses, embeddings.

Imports: server/api/shared. Begin with chat.py.
"""
