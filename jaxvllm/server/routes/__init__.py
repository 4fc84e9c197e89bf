"""The endpoints, with a module for each group of them."""
