"""The host side: requests, the scheduler, the page pool and the plan of a step. Never imports jax."""
