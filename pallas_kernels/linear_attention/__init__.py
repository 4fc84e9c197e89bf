"""States of linear attention that take in the tokens of rows of any length, in pages."""
