"""Benchmarks of an engine in this process, or in processes that it starts. No server and no client is involved."""
