"""The core loop, from a checked request to its outputs, and what users hold: the offline `LLM` and its outputs."""
