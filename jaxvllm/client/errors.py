"""What can go wrong between a client and its server: one line each, for a person."""


class ServerError(Exception):
    """The server is not there, refused the request, or broke off. `status` is None where there was no answer."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status
