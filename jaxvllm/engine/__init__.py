"""The step loop and what surrounds it: tokenizer, incremental text, outputs, the offline `LLM`."""
