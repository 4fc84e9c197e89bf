"""Metrics of requests and of the engine, for Prometheus and for the log."""
