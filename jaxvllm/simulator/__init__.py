"""Runs the real scheduler and router in virtual time, to tell how a deployment would answer a load."""
