"""The ladder: the same requests through each idea of LLM serving, one on top of the other, on one engine."""
