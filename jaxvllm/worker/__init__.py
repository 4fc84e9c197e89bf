"""An engine in its own process: the client that starts it, the messages between the two, and the process itself."""
