# SPDX-License-Identifier: Apache-2.0
"""Requests to a server over HTTP, whose every failure says what the server did and what to do."""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


class HttpClient:
    """One server; the environment variable `OPENAI_API_KEY` holds its key if it has one.

    Args:
        url: Its address.
        timeout: Seconds without a byte after which a request has failed.

    Raises:
        ServerError: When the address is none, and by every method when the server fails.
    """

    def __init__(self, url: str, timeout: float):
        self.url, self.timeout = url, timeout
        if not url.startswith(("http://", "https://")):
            raise ServerError(f"{url!r} is no address of a server; give one such as http://localhost:8000.")
        if timeout <= 0:
            raise ServerError(f"The timeout for {url} is {timeout:g} seconds; expected more than 0.")

    def text(self, path: str) -> str:
        """A page."""
        with self.opened(path) as response:
            return response.read().decode()

    def json(self, path: str) -> dict[str, Any]:
        """A page that holds a JSON object."""
        with self.opened(path) as response:
            return json_object(response.read())

    @contextmanager
    def opened(self, path: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
        """A response while it is read, as the answer to a body if there is one."""
        headers = {"Content-Type": "application/json"}
        if os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with open_url(urllib.request.Request(self.url + path, data, headers), self.timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise self._refused(path, error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failed(path, error) from error

    def _refused(self, path: str, error: urllib.error.HTTPError) -> ServerError:
        text = error.read().decode(errors="replace")[:500]
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
                f"{self.url}{path} gave nothing for {self.timeout:g} seconds. See the server's log, or raise the "
                "timeout."
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


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text.

    Raises:
        ValueError: When it holds something else.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {str(text)[:80]!r}")
    return value


__all__ = ["HttpClient", "PageMissing", "ServerError", "json_object", "open_url"]
