# SPDX-License-Identifier: Apache-2.0
"""Asking an OpenAI-compatible server (vLLM, SGLang) for chat completions: many at once, each until it is answered."""

import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from .server_http import open_url


# Answers that a later request may turn into a better one.
RETRIED_STATUSES = (408, 409, 425, 429)
LONGEST_WAIT = 60.0


class AnswerError(RuntimeError):
    """A prompt stays unanswered; says what the server did."""


@dataclass(frozen=True)
class CompletionServer:
    """A server and how patiently it is asked.

    Args:
        url: Base address, such as `http://127.0.0.1:8000/v1`.
        timeout: Seconds without a byte from the server after which a request is given up and sent again.
        retries: How often a request that fails is sent again: on connection errors, timeouts, 429 and 5xx.
        first_wait: Seconds before the first retry, doubled for each further one, unless the server says how long.
    """

    url: str
    timeout: float = 1800.0
    retries: int = 8
    first_wait: float = 1.0

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The first choice of the answer to a chat completion request.

        Raises:
            AnswerError: The server refuses the request, or has failed `retries` + 1 times.
        """
        failure = ""
        for attempt in range(self.retries + 1):
            pause = min(LONGEST_WAIT, self.first_wait * 2**attempt) * random.uniform(0.75, 1.25)
            try:
                return self._ask(body)
            except urllib.error.HTTPError as error:
                failure = f"status {error.code}: {error.read(300).decode(errors='replace')}"
                if error.code < 500 and error.code not in RETRIED_STATUSES:
                    raise AnswerError(f"the server refused the request ({failure})") from error
                pause = _retry_after(error.headers.get("Retry-After")) or pause
            # A closed connection, a stall, or half an answer.
            except (OSError, http.client.HTTPException, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
            if attempt < self.retries:
                time.sleep(pause)
        raise AnswerError(f"the server failed {self.retries + 1} times, the last time with {failure}")

    def _ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        with open_url(request, self.timeout) as response:
            answer = json.load(response)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not choices or not isinstance(choices[0].get("message"), dict):
            raise ValueError(f"the answer has no message: {str(answer)[:200]}")
        return choices[0]

    def answer_all(
        self, bodies: Iterable[tuple[int, Mapping[str, Any]]], concurrency: int
    ) -> Iterator[tuple[int, dict[str, Any] | AnswerError]]:
        """Answers to numbered requests in the order they come, at most `concurrency` asked at once.

        Raises:
            AnswerError: Nothing was answered while as many requests failed as are asked at once.
        """
        remaining = iter(bodies)
        pending: dict[Future, int] = {}
        failed, answered = 0, 0
        with ThreadPoolExecutor(concurrency) as threads:
            try:
                while True:
                    while len(pending) < concurrency and (item := next(remaining, None)) is not None:
                        pending[threads.submit(self.answer, item[1])] = item[0]
                    if not pending:
                        return
                    done, _ = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        number, error = pending.pop(future), future.exception()
                        if error is not None and not isinstance(error, AnswerError):
                            raise error
                        failed, answered = failed + (error is not None), answered + (error is None)
                        if error is not None and not answered and failed >= concurrency:
                            raise AnswerError(f"Nothing at {self.url} answers: {error}") from error
                        yield number, future.result() if error is None else error
            finally:
                threads.shutdown(wait=False, cancel_futures=True)


def _retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or as a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return None
