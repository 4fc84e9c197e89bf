"""Scripts that build parts of this repository; none of them is installed."""
