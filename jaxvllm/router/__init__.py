"""A proxy before several servers: it spreads requests, and sends a prompt to one server and the answer to another."""
