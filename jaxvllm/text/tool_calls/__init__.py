"""Tool calls in a model's text: what a caller offers, the formats of many models, and the engine that reads them."""
