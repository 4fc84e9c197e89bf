"""One decoder for all model families, with its frozen spec, its parameters, and the readers of checkpoints."""
