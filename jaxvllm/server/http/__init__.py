"""HTTP below the API: the socket, its connections, and the guards that every request passes."""
