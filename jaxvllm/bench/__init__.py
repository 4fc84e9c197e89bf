"""`jaxvllm bench`: loads a server and measures its answers, or measures an engine in this process (`offline`)."""
