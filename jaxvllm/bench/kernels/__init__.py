"""Measures attention on the device at hand: the error of each case first, then its time beside measured ceilings."""
