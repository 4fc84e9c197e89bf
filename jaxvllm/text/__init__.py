"""Text on both sides of the model: turns prompts into tokens, and tokens into text."""
