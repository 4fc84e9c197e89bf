"""One decoder for all families: a frozen spec, its parameters, and how checkpoints become them."""
