"""KV that travels: pages leave an engine, wait in host memory or in files or cross to others, and come back."""
