"""Endpoints that change a server refuse web pages, because any page could make a browser send such a request."""

from fastapi import Request

from jaxvllm.server.errors import ApiError


def refuse_web_page(request: Request, what: str) -> None:
    """Raises ApiError for a request of a web page, which may not do `what`."""
    if "origin" in request.headers:
        raise ApiError(403, f"a web page may not {what}: use a program such as curl")
