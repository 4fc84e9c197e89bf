"""Shows what an engine did for requests, from their `Explanation`s: as text, and as one HTML file."""
