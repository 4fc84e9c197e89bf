"""The device side: permanent per-slot state, the pure step function, its buckets and compiled programs."""
