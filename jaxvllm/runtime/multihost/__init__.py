"""One engine over several processes: process 0 sends each call to the others, and they make the same calls."""
