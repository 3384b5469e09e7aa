"""HTTP to a reward endpoint: its address, a connection, and an answer of bounded length.

Knows sockets and bytes. Does not know what requests and answers mean (`endpoint.py`); imports no
jax.
"""

import contextlib
import io
import socket
from dataclasses import dataclass
from http.client import HTTP_PORT, HTTPS_PORT, HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from pat_jax.common.errors import UserError

LARGEST_ANSWER = 2**24  # bytes, headers included; a score takes about twenty


class TooLongError(Exception):
    """An answer is longer than `LARGEST_ANSWER`."""


@dataclass(frozen=True)
class Address:
    is_secure: bool
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """Parses a URL. Raises UserError if it is not a valid one, or has a user or password, which
        would be stored."""
        is_plain = url.isascii() and url.isprintable() and " " not in url
        with contextlib.suppress(ValueError):  # of a port or a host that cannot be
            parts = urlsplit(url)
            if is_plain and parts.hostname and "@" not in parts.netloc:
                # A connection does the same: it fails if a label has more than 63 characters.
                parts.hostname.encode("idna")
                is_secure = parts.scheme == "https"
                usual = HTTPS_PORT if is_secure else HTTP_PORT
                port = usual if parts.port is None else parts.port
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                return cls(is_secure, parts.hostname, port, path)
        raise UserError(
            f"option --reward is {url!r}: expected an address such as http://host:8000/score, in ASCII "
            "and without a user; correct it."
        )

    def connection(self, timeout: float) -> HTTPConnection:
        """Returns a connection that is not open yet; `timeout` limits connecting, in seconds."""
        kind = HTTPSConnection if self.is_secure else HTTPConnection
        opened = kind(self.host, self.port, timeout=timeout)
        opened.response_class = _Answer
        return opened


class _Answer(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **options: Any):
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = _Reader(_Bounded(sock.makefile("rb", buffering=0)))


class _Reader(io.BufferedReader):
    """Refuses a chunk of an announced size above LARGEST_ANSWER, before its bytes are allocated."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > LARGEST_ANSWER:
            raise TooLongError
        return super().read(size)


class _Bounded(io.RawIOBase):
    """Raises TooLongError at the read that exceeds LARGEST_ANSWER, even in a chunk of size -1,
    which would be read without end."""

    def __init__(self, raw: Any):
        self._raw = raw
        self._left = LARGEST_ANSWER

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        read = self._raw.readinto(buffer)
        self._left -= read or 0
        if self._left < 0:
            raise TooLongError
        return read

    def close(self) -> None:
        self._raw.close()
        super().close()
