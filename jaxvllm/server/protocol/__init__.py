"""The bodies of HTTP requests, checked field by field, and of responses, in the forms of OpenAI, Anthropic and vLLM."""
