"""A response of HTTP/1.1, taken apart as it arrives (RFC 9112)."""


class ResponseReader:
    """Feed it what a socket gives; it returns the body's bytes. ValueError for what is not HTTP.

    `status` is 0 until the head is there. `done` once the body is whole, which a response without a length is only
    when the connection ends. `reusable`: whether the connection may carry another request.
    """

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.reusable = False
        self._rest = b""
        self._is_chunked = False
        self._remaining: int | None = None  # bytes of a body with a length; None: until the connection ends

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body that `data` completes: whole chunks where the body is sent in chunks."""
        self._rest += data
        if not self.status and not self._read_head():
            return b""
        if self._is_chunked:
            return self._read_chunks()
        body, self._rest = self._rest[: self._remaining], b""
        if self._remaining is not None:
            self._remaining -= len(body)
            self.done = self._remaining == 0
        return body

    def end(self) -> None:
        """The connection ended. ValueError when the response had not."""
        if not self.status or self._is_chunked or self._remaining is not None:
            raise ValueError("the connection ended within the response" if self.status else "no response")
        self.done = True

    def _read_head(self) -> bool:
        head, blank, self._rest = self._rest.partition(b"\r\n\r\n")
        if not blank:
            self._rest = head
            return False
        first, *lines = head.split(b"\r\n")
        version, _, status = first.partition(b" ")
        if not (version.startswith(b"HTTP/1.") and status[:3].isdigit()):
            raise ValueError(f"the server does not speak HTTP/1: {first[:80]!r}")
        if status.startswith(b"1"):  # an interim response, such as 100 Continue
            return self._read_head()
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self._is_chunked = fields.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        if not self._is_chunked and b"content-length" in fields:
            self._remaining = int(fields[b"content-length"])
            self.done = self._remaining == 0
        framed = self._is_chunked or self._remaining is not None
        self.reusable = framed and version == b"HTTP/1.1" and fields.get(b"connection", b"").lower() != b"close"
        self.status = int(status[:3])
        return True

    def _read_chunks(self) -> bytes:
        """Chunks are small here, an event or a few: one is taken when it is whole."""
        rest, at, pieces = self._rest, 0, []
        while (end := rest.find(b"\r\n", at)) >= 0:
            size = int(rest[at:end].partition(b";")[0], 16)
            if size == 0:
                self.done = rest.find(b"\r\n\r\n", end) >= 0  # trailers, if any, are skipped
                break
            stop = end + 2 + size
            if len(rest) < stop + 2:
                break
            pieces.append(rest[end + 2 : stop])
            at = stop + 2
        self._rest = rest[at:]
        return b"".join(pieces)
