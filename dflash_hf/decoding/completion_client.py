# SPDX-License-Identifier: Apache-2.0
"""Asking an OpenAI-compatible server (vLLM, SGLang) for chat completions: many at once, each until it is answered."""

import http.client
import json
import math
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from .server_http import api_key, check_server_address, open_url, read_whole, start_of_body


# Answers that a later request may turn into a better one.
RETRIED_STATUSES = (408, 409, 425, 429)
LONGEST_WAIT = 60.0
# Servers may ask for more patience, but not for days.
LONGEST_RETRY_AFTER = 600.0
# So many prompts in a row may fail by themselves after others were answered.
FEWEST_FAILURES = 8


class AnswerError(RuntimeError):
    """A prompt stays unanswered; says what the server did."""


class RefusedError(AnswerError):
    """The server answers, but not this prompt."""


@dataclass(frozen=True)
class CompletionServer:
    """A server and how patiently it is asked.

    Args:
        url: Base address, such as `http://127.0.0.1:8000/v1`.
        timeout: Seconds without a byte from the server after which a request is given up and sent again.
        retries: How often a request that fails is sent again: on connection errors, timeouts, 429 and 5xx.
        first_wait: Seconds before the first retry, doubled for each further one, unless the server says how long.

    Raises:
        ValueError: The address is none of HTTP or holds credentials, or OPENAI_API_KEY cannot be sent.
    """

    url: str
    timeout: float = 1800.0
    retries: int = 8
    first_wait: float = 1.0

    def __post_init__(self) -> None:
        check_server_address(self.url)
        api_key()

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The first choice of the answer to a chat completion request, with the answer's `usage`.

        Raises:
            AnswerError: The server refuses the request, or has failed `retries` + 1 times.
        """
        failure = ""
        for attempt in range(self.retries + 1):
            pause = min(LONGEST_WAIT, self.first_wait * 2**attempt) * random.uniform(0.75, 1.25)
            try:
                return self._ask(body)
            except urllib.error.HTTPError as error:
                failure = f"status {error.code}: {start_of_body(error)}"
                if error.code < 500 and error.code not in RETRIED_STATUSES:
                    raise RefusedError(f"the server refused the request ({failure})") from error
                pause = _retry_after(error.headers.get("Retry-After")) or pause
            # A closed connection, a stall, or half an answer.
            except (OSError, http.client.HTTPException, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
            if attempt < self.retries:
                time.sleep(pause)
        raise AnswerError(f"the server failed {self.retries + 1} times, the last time with {failure}")

    def _ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := api_key():
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        with open_url(request, self.timeout) as response:
            answer = json.loads(read_whole(response, self.timeout))
        choices = answer.get("choices") if isinstance(answer, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(first, dict) or not isinstance(first.get("message"), dict):
            raise ValueError(f"the answer has no message: {str(answer)[:200]}")
        usage = answer.get("usage")
        return {**first, "usage": usage if isinstance(usage, dict) else {}}

    def answer_all(
        self, bodies: Iterable[tuple[int, Mapping[str, Any]]], concurrency: int
    ) -> Iterator[tuple[int, dict[str, Any] | AnswerError]]:
        """Answers to numbered requests in the order they come, at most `concurrency` asked at once.

        Raises:
            AnswerError: Nothing was answered from the start while as many requests failed as are asked at once, or
                the server, once it had answered, let as many fail one after the other: it is gone.
        """
        remaining = iter(bodies)
        pending: dict[Future, int] = {}
        failed_in_a_row, has_answered = 0, False
        threads = ThreadPoolExecutor(concurrency)
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
                    has_answered |= error is None
                    # A server that refuses prompts is there; one that has refused all of them is of no use.
                    is_failure = error is not None and not (has_answered and isinstance(error, RefusedError))
                    failed_in_a_row = failed_in_a_row + 1 if is_failure else 0
                    if failed_in_a_row >= (max(concurrency, FEWEST_FAILURES) if has_answered else concurrency):
                        more = " any more" if has_answered else ""
                        raise AnswerError(f"Nothing at {self.url} answers{more}: {error}") from error
                    yield number, future.result() if error is None else error
        finally:
            # Whoever stops early does not wait for answers that may take half an hour.
            threads.shutdown(wait=False, cancel_futures=True)


def _retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or as a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return None if math.isnan(seconds) else min(max(0.0, seconds), LONGEST_RETRY_AFTER)
