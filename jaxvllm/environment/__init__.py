"""What `jaxvllm env` reports about this machine and its software."""
