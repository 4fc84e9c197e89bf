"""What a model will need of devices that nobody has to own: the real step, compiled for them, and what it says."""
