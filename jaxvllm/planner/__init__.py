"""Tells what a model would need of devices, by compiling its real step for them; no such device has to be there."""
