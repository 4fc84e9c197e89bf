"""`jaxvllm bench`: puts load on a server and measures the answers."""
