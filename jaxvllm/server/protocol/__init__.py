"""What goes over HTTP: requests, checked field by field, and responses, as clients of others know them."""
