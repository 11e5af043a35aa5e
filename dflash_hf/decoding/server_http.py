# SPDX-License-Identifier: Apache-2.0
"""Requests to a server over HTTP, whose every failure says what the server did and what to do."""

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


# Of a page or a whole answer, which are some kilobytes; more is something else, or never ends.
LARGEST_PAGE = 2**26


class ServerError(RuntimeError):
    """A server that cannot be measured; the message says why and what to do."""


class PageMissing(ServerError):
    """The server has no such page."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Leaves redirects alone: they would carry the key to another host, and turn requests into others."""

    def redirect_request(self, *args: Any) -> None:
        return None


def open_url(request: urllib.request.Request, timeout: float) -> Any:
    """`urllib.request.urlopen` that takes a redirect for the error that it is to a client with a key."""
    return urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout)


def api_key() -> str:
    """The servers' key, from the environment variable `OPENAI_API_KEY`; empty where there is none.

    Raises:
        ValueError: It cannot be sent. The message does not repeat it.
    """
    # Files of variables often leave a line end on the last value.
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("OPENAI_API_KEY holds characters that no HTTP header may hold: set it again.")
    return key


def check_server_address(url: str) -> None:
    """Refuse what is no address of a server, before anything waits for an answer from there.

    Raises:
        ValueError: Saying why, without repeating what may be a secret.
    """
    try:
        address = urllib.parse.urlsplit(url)
        # Neither is repeated: it would stand in every log.
        if "@" in address.netloc or address.query:
            raise ValueError("The server's address holds credentials or a query: give the key as OPENAI_API_KEY.")
        host, _ = address.hostname, address.port
    except ValueError as error:
        if "OPENAI_API_KEY" in str(error):
            raise
        raise ValueError(
            f"{url!r} is no address of a server ({error}); give one such as http://localhost:8000."
        ) from None
    # HTTP has blanks and letters with accents escaped.
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if address.scheme not in ("http", "https") or not host or not is_plain:
        raise ValueError(f"{url!r} is no address of a server; give one such as http://localhost:8000.")


class HttpClient:
    """One server; the environment variable `OPENAI_API_KEY` holds its key if it has one.

    Args:
        url: Its address.
        timeout: Seconds without a byte, or a part of the answer, after which a request has failed, and seconds that
            a page may take.

    Raises:
        ServerError: When the address is none, and by every method when the server fails.
    """

    def __init__(self, url: str, timeout: float):
        self.url, self.timeout = url, timeout
        try:
            check_server_address(url)
            self._key = api_key()
        except ValueError as error:
            raise ServerError(str(error)) from None
        if timeout <= 0:
            raise ServerError(f"The timeout for {url} is {timeout:g} seconds; expected more than 0.")

    def text(self, path: str) -> str:
        """A page."""
        with self.opened(path) as response:
            return read_whole(response, self.timeout).decode()

    def json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A page that holds a JSON object, or the answer to a body."""
        with self.opened(path, body) as response:
            return json_object(read_whole(response, self.timeout))

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON of each server-sent event of a streamed answer to a body."""
        events, last = [], time.monotonic()
        with self.opened(path, body) as response:
            while line := response.readline(LARGEST_PAGE):
                field, _, value = line.decode().strip().partition(":")
                if field == "data":
                    last = time.monotonic()
                    if value.strip() != "[DONE]":
                        events.append(json_object(value))
                # Comments keep a connection alive behind which nothing is written any more.
                elif time.monotonic() - last > self.timeout:
                    raise TimeoutError
        return events

    @contextmanager
    def opened(self, path: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
        """A response while it is read, as the answer to a body if there is one."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with open_url(urllib.request.Request(self.url + path, data, headers), self.timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise self._refused(path, error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failed(path, error) from error

    def _refused(self, path: str, error: urllib.error.HTTPError) -> ServerError:
        text = start_of_body(error)
        advice = ""
        if error.code in (401, 403):
            advice = " Put the server's key into the environment variable OPENAI_API_KEY."
        if 300 <= error.code < 400:
            advice = f" It redirects to {error.headers.get('Location')}: if that is the server, give its address."
        kind = PageMissing if error.code == 404 else ServerError
        return kind(f"{self.url}{path} answered with status {error.code}: {text}{advice}")

    def _failed(self, path: str, error: Exception) -> ServerError:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            return ServerError(
                f"{self.url}{path} gave nothing for {self.timeout:g} seconds, or came to no end. See the server's "
                "log, or raise the timeout."
            )
        if isinstance(error, urllib.error.URLError):
            return ServerError(f"{self.url} cannot be reached ({reason}). Start the server, or correct the address.")
        if isinstance(error, ValueError):
            return ServerError(
                f"{self.url}{path} answered with something else than the JSON or text that vLLM and SGLang give there "
                f"({error}). Give the address of the engine itself, not of a gateway or a web page."
            )
        return ServerError(
            f"{self.url}{path} broke off ({type(error).__name__}: {error}). See the server's log; it may have been "
            "killed or restarted."
        )


def read_whole(response: Any, timeout: float) -> bytes:
    """All of a response, for which a server that dribbles on without end is not waited.

    Args:
        response: Whose head has been read.
        timeout: Seconds that the rest may take.

    Raises:
        TimeoutError, ValueError, http.client.IncompleteRead: It has no end in time, is too large, or breaks off.
    """
    content, end = bytearray(), time.monotonic() + timeout
    while part := response.read1(2**16):
        content += part
        if len(content) > LARGEST_PAGE:
            raise ValueError(f"more than {LARGEST_PAGE >> 20} MiB")
        if time.monotonic() > end:
            raise TimeoutError(f"no end within {timeout:g} seconds")
    # Unlike `read`, reading in parts takes a body that breaks off for a whole one.
    if response.length:
        raise http.client.IncompleteRead(bytes(content), response.length)
    return bytes(content)


def start_of_body(error: urllib.error.HTTPError) -> str:
    """What a server says with an error status, as far as it comes."""
    try:
        return error.read(500).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text.

    Raises:
        ValueError: When it holds something else.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {str(text)[:80]!r}")
    return value


__all__ = [
    "HttpClient",
    "PageMissing",
    "ServerError",
    "api_key",
    "check_server_address",
    "json_object",
    "open_url",
    "read_whole",
    "start_of_body",
]
