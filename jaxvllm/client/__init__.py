"""Clients of any OpenAI-compatible server. They import neither jax, nor the engine, nor our server."""
