"""The HTTP server: OpenAI's and Anthropic's endpoints over an engine in another process. Never imports jax."""
