"""The report of `jaxvllm env` about this machine and its software."""
