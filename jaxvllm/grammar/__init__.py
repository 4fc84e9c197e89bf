"""Structured outputs: llguidance compiles a request's schema or grammar, which then says which tokens may come."""
