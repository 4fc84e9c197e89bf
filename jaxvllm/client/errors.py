"""Errors between a client and its server. Their messages are one line for a person."""


class ServerError(Exception):
    """Raised when the server is not there, refuses the request, or breaks off. Without an answer, `status` is None."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status
