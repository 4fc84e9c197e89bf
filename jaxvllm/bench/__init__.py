"""Load on a server, and what came of it: `jaxvllm bench`."""
