# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible servers (vLLM, SGLang): their answers, their counters, the acceptance length they reach."""

import http.client
import json
import math
import os
import random
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias

from tqdm.auto import tqdm
from transformers.utils import logging

from .prompts import EvaluationPrompt


# --- Requests to a server over HTTP, whose every failure says what the server did and what to do.


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


# --- What vLLM and SGLang say in their metrics about the drafts that they verified since their start.


def or_none(value: float) -> float | None:
    """A number as JSON can hold it: None for nan."""
    return None if math.isnan(value) else value


# More slots than any block has.
MAX_SLOTS = 1024

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")

_POSITION = re.compile(r'position="(\d+)"')


class CountersMissing(RuntimeError):
    """The server does not say what it verified; the message says why and what to do."""


@dataclass(frozen=True)
class Verifications:
    """What some verifications of the target committed.

    Args:
        forwards: Verification forwards.
        accepted: Accepted drafts over all of them.
        by_slot: Forwards that accepted the draft of slot 1, 2, ..; empty where the server does not tell.
    """

    forwards: float = 0
    accepted: float = 0
    by_slot: list[float] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Accepted drafts and the target's own token, per forward; nan without any forward."""
        return 1 + self.accepted / self.forwards if self.forwards else math.nan

    def since(self, before: "Verifications") -> "Verifications":
        """What came after an earlier count."""
        then = before.by_slot + [0.0] * (len(self.by_slot) - len(before.by_slot))
        by_slot = [new - old for new, old in zip(self.by_slot, then, strict=True)]
        return Verifications(self.forwards - before.forwards, self.accepted - before.accepted, by_slot)

    def went_back(self, before: "Verifications") -> bool:
        """Whether any count is below an earlier one."""
        counts, then = (
            [self.forwards, self.accepted, *self.by_slot],
            [before.forwards, before.accepted, *before.by_slot],
        )
        return len(counts) < len(then) or any(new < old for new, old in zip(counts, then, strict=False))

    @staticmethod
    def total(parts: Iterable["Verifications"]) -> "Verifications":
        """The sum over some parts."""
        parts = list(parts)
        slots = max((len(part.by_slot) for part in parts), default=0)
        by_slot = [sum(part.by_slot[k] for part in parts if k < len(part.by_slot)) for k in range(slots)]
        return Verifications(sum(p.forwards for p in parts), sum(p.accepted for p in parts), by_slot)


def count_of(value: Any, name: str) -> float:
    """A count as a server gives it.

    Args:
        value: What it gives.
        name: As what.

    Raises:
        CountersMissing: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise CountersMissing(f"it gives {str(value)[:40]!r} as {name}, where a count is expected. See its log.")
    return value


def vllm_counters(page: str) -> Verifications:
    """What a vLLM server has verified since its start.

    Args:
        page: Its `/metrics`.

    Raises:
        CountersMissing: When it does not speculate, or gives what is no count.
    """
    samples = list(_samples(page))

    def total(name: str) -> float:
        found = [count_of(value, name) for sample, _, value in samples if sample in (name, f"{name}_total")]
        if not found:
            raise CountersMissing(
                f"its metrics lack {name}, so it was started without speculation. Start it with --speculative-config "
                "(`dflash-hf validate DRAFTER` prints the command)."
            )
        return sum(found)

    by_slot: dict[int, float] = {}
    for name, labels, value in samples:
        position = _POSITION.search(labels)
        if name.removesuffix("_total") == "vllm:spec_decode_num_accepted_tokens_per_pos" and position:
            by_slot[int(position[1])] = by_slot.get(int(position[1]), 0) + count_of(value, name)
    if sorted(by_slot) != list(range(len(by_slot))):
        raise CountersMissing(f"its metrics count the slots {sorted(by_slot)[:MAX_SLOTS]}, of which some are missing.")
    return Verifications(
        total("vllm:spec_decode_num_drafts"),
        total("vllm:spec_decode_num_accepted_tokens"),
        [by_slot[k] for k in sorted(by_slot)],
    )


def sglang_counters(info: dict[str, Any], page: str | None) -> Verifications:
    """What an SGLang server has verified since its start.

    Args:
        info: Its `/server_info`, with the mean acceptance length since its start.
        page: Its `/metrics`, whose numbers of tokens and requests turn the mean into counts; None without that page.

    Raises:
        CountersMissing: When the counts cannot be had.
    """
    states = info.get("internal_states") or [{}]
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        raise CountersMissing(f"its internal_states are {str(states)[:80]!r}, where a list of objects is expected.")
    if len(states) > 1:
        raise CountersMissing(f"it runs {len(states)} data-parallel workers, whose means cannot be pooled. Run one.")
    length = count_of(states[0].get("avg_spec_accept_length") or 0, "avg_spec_accept_length")
    if not length:
        return Verifications()
    if length < 1:
        raise CountersMissing(f"its avg_spec_accept_length is {length}, and each verification commits a token.")
    samples = list(_samples(page or ""))
    names = ("sglang:generation_tokens_total", "sglang:num_requests_total")
    tokens, requests = ([count_of(value, name) for n, _, value in samples if n == name] for name in names)
    if not tokens or not requests:
        raise CountersMissing(
            "it gives the mean acceptance length since its start and no number of tokens, so what was before cannot "
            "be taken off. Start it with --enable-metrics."
        )
    # The first token of an answer is the prefill's.
    verified = sum(tokens) - sum(requests)
    return Verifications(verified / length, verified - verified / length)


def _samples(page: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of each sample of a Prometheus text page."""
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match:
            yield match[1], match[2] or "", _number(match[3])


def _number(text: str) -> float:
    """A number; nan for what is none, which no count is either."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# --- What is in an answer of vLLM or SGLang, whole or in the chunks of a stream.


class MalformedAnswer(ValueError):
    """An answer that has another form than vLLM's or SGLang's; the message says which part of it."""


@dataclass(frozen=True)
class AnswerContent:
    """An answer.

    Args:
        text: What was written, its reasoning first.
        num_tokens: Generated tokens, as the server counts them.
        verifications: The answer's own, where the server tells.
    """

    text: str
    num_tokens: int
    verifications: Verifications | None


def answer_content(chunks: Sequence[dict[str, Any]]) -> AnswerContent | None:
    """What the chunks of an answer hold together; None where they break off before the server's count of tokens.

    Args:
        chunks: Those of a stream, or the whole answer as the only one.

    Raises:
        MalformedAnswer: Naming the part.
    """
    usages = [usage for chunk in chunks if (usage := _part(chunk, "usage", dict))]
    if not usages:
        return None
    num_tokens = usages[-1].get("completion_tokens")
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 0:
        raise MalformedAnswer(f"completion_tokens is {str(num_tokens)[:40]!r}")
    own = [verifications for chunk in chunks if (verifications := own_verifications(chunk))]
    return AnswerContent("".join(_text(chunk) for chunk in chunks), num_tokens, own[-1] if own else None)


def own_verifications(answer: dict[str, Any]) -> Verifications | None:
    """An answer's own verifications, from its JSON or the last chunk of its stream, where the engine gives them.

    Raises:
        MalformedAnswer: It gives them in another form.
    """
    try:
        return _own_verifications(answer)
    except CountersMissing as error:
        raise MalformedAnswer(str(error)) from error


def _own_verifications(answer: dict[str, Any]) -> Verifications | None:
    vllm = _part(_part(answer, "metrics", dict), "speculative_decoding", dict)
    if vllm:
        histogram = _part(vllm, "acceptance_histogram", dict)
        if not all(str(accepted).isdecimal() for accepted in histogram):
            raise MalformedAnswer(f"acceptance_histogram is {str(histogram)[:80]!r}")
        forwards, accepted = (count_of(vllm.get(n), n) for n in ("num_spec_steps", "num_accepted_draft_tokens"))
        return Verifications(forwards, accepted, _at_least({int(k): count for k, count in histogram.items()}))
    choices = _choices(answer)
    sglang = _part(answer, "meta_info", dict) or (_part(choices[0], "meta_info", dict) if choices else {})
    if "spec_verify_ct" not in sglang:
        return None
    forwards = count_of(sglang["spec_verify_ct"], "spec_verify_ct")
    histogram = dict(enumerate(_part(sglang, "spec_accept_histogram", list)))
    tokens = count_of(_part(answer, "usage", dict).get("completion_tokens"), "completion_tokens")
    # The first token is the prefill's; each verification commits one at least.
    accepted = count_of(tokens - 1 - forwards, f"the accepted drafts of {tokens} tokens in {forwards} verifications")
    return Verifications(forwards, accepted, _at_least(histogram))


def _at_least(histogram: dict[int, Any]) -> list[float]:
    """From the number of forwards that accepted 0, 1, .. drafts: those that accepted at least 1, 2, .."""
    counts = {accepted: count_of(count, f"forwards with {accepted} accepted") for accepted, count in histogram.items()}
    most = max((accepted for accepted, count in counts.items() if count), default=0)
    if most > MAX_SLOTS:
        raise MalformedAnswer(f"a block of it accepted {most} drafts, more than any block has")
    return [sum(count for accepted, count in counts.items() if accepted >= k) for k in range(1, most + 1)]


def _text(chunk: dict[str, Any]) -> str:
    """What a chunk adds to the answer, reasoning included."""
    messages = [_part(c, "delta", dict) or _part(c, "message", dict) for c in _choices(chunk)]
    names = ("reasoning_content", "reasoning", "content")
    return "".join(_part(message, name, str) for message in messages for name in names)


def _choices(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    choices = _part(chunk, "choices", list)
    if not all(isinstance(choice, dict) for choice in choices):
        raise MalformedAnswer(f"choices is {str(choices)[:80]!r}")
    return choices


def _part(whole: dict[str, Any], name: str, kind: type) -> Any:
    """A part that may be missing or null, which is then empty."""
    value = whole.get(name)
    if value is not None and not isinstance(value, kind):
        raise MalformedAnswer(f"{name} is {str(value)[:80]!r}")
    return kind() if value is None else value


# --- A running vLLM or SGLang server: its OpenAI-compatible API and its counters.


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class ServedAnswer:
    """An answer of a server.

    Args:
        prompt: What was asked.
        text: What it wrote, its reasoning first.
        num_tokens: Generated tokens, as the server counts them.
        seconds: From sending the request to the last token.
        verifications: The answer's own, where the server tells.
    """

    prompt: EvaluationPrompt
    text: str
    num_tokens: int
    seconds: float
    verifications: Verifications | None = None


class Server:
    """A running vLLM or SGLang server; the environment variable `OPENAI_API_KEY` holds its key if it has one.

    Args:
        url: Its address, with or without `/v1`.
        timeout: Seconds without a byte after which a request has failed.
        speculates: Whether it must speculate, so that there is something to measure.
        model: The model to ask; by default the first that it lists.

    Raises:
        ServerError: When it does not answer, is neither of the two, has no such model, or does not speculate although
            it must.
    """

    def __init__(self, url: str, timeout: float = 600.0, speculates: bool = True, model: str | None = None):
        self.url = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
        self._http = HttpClient(self.url, timeout)
        self.model = self._find_model(model)
        self.engine = self._find_engine(speculates)

    def counters(self) -> Verifications:
        """What the server has verified since its start.

        Raises:
            ServerError: When it does not say.
        """
        page = self._metrics()
        try:
            if self.engine == "vllm":
                return vllm_counters(page or "")
            return sglang_counters(self._server_info() or {}, page)
        except CountersMissing as error:
            raise ServerError(f"{self.url} does not say what it verified: {error}") from error

    def settled_counters(self) -> Verifications:
        """[`counters`] once they stand still: engines write them a moment after the last token."""
        last = self.counters()
        for _ in range(20):
            time.sleep(0.1)
            now = self.counters()
            if now == last:
                return now
            last = now
        raise ServerError(
            f"The counters of {self.url} still rise two seconds after the last answer: somebody else uses the server. "
            "Measure on a server that has no other requests."
        )

    def ask(self, prompt: EvaluationPrompt, settings: dict[str, Any]) -> ServedAnswer:
        """Let it answer one prompt.

        Args:
            prompt: The prompt.
            settings: Fields of the request, such as `max_tokens` and `temperature`.

        Raises:
            ServerError: When it answers with an error, breaks off, or takes too long.
        """
        body = {"model": self.model, **request_body(prompt, settings)}
        # vLLM tells an answer's verifications behind its last token, SGLang in whole answers only.
        streams = self.engine == "vllm"
        body |= {"stream": True, "stream_options": {"include_usage": True}} if streams else {"return_meta_info": True}
        path, start = "/v1/chat/completions", time.perf_counter()
        try:
            chunks = self._http.events(path, body) if streams else [self._http.json(path, body)]
        except ServerError as error:
            raise ServerError(f"{error} The prompt was {_start_of(prompt)}.") from error
        seconds = time.perf_counter() - start
        errors = [chunk["error"] for chunk in chunks if chunk.get("error")]
        try:
            content = None if errors else answer_content(chunks)
        except MalformedAnswer as error:
            raise ServerError(
                f"{self.url} answered {_start_of(prompt)} in another form than vLLM and SGLang do: {error}. Give the "
                "address of the engine itself, not of a gateway."
            ) from error
        if content is None:
            problem = f"an error: {errors[0]}" if errors else "an answer that breaks off before its `usage`"
            raise ServerError(f"{self.url} answered {_start_of(prompt)} with {problem}. See the server's log.")
        return ServedAnswer(prompt, content.text, content.num_tokens, seconds, content.verifications)

    def _find_model(self, wanted: str | None) -> str:
        models = self._http.json("/v1/models").get("data") or [{"id": "default"}]
        # Adapters are listed behind the model that they adapt.
        names = [model["id"] for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)]
        if not names or wanted not in (None, *names):
            raise ServerError(
                f"{self.url} serves {', '.join(names) or 'no model'}" + (f", not {wanted}." if wanted else ".")
            )
        if wanted is None and len(names) > 1:
            logger.warning(f"{self.url} serves {', '.join(names)}: {names[0]} is asked unless another is named.")
        return wanted or names[0]

    def _find_engine(self, speculates: bool) -> str:
        if "\nvllm:" in "\n" + (self._metrics() or ""):
            self.engine = "vllm"
            if speculates:
                self.counters()
            return "vllm"
        info = self._server_info()
        if info is None:
            raise ServerError(
                f"{self.url} has neither vLLM's metrics (/metrics with vllm:...) nor SGLang's /server_info, so it "
                "does not say what it verified. Give the address of the engine itself, not of a gateway before it."
            )
        if speculates and not info.get("speculative_algorithm"):
            raise ServerError(
                f"{self.url} is an SGLang server without speculation (its speculative_algorithm is "
                f"{info.get('speculative_algorithm')}). Start it with --speculative-algorithm (`dflash-hf validate "
                "DRAFTER` prints the command)."
            )
        return "sglang"

    def _metrics(self) -> str | None:
        try:
            return self._http.text("/metrics")
        except PageMissing:
            return None

    def _server_info(self) -> dict[str, Any] | None:
        # Older releases know the longer name alone.
        for path in ("/server_info", "/get_server_info"):
            try:
                return self._http.json(path)
            except PageMissing:
                continue
        return None


def request_body(prompt: EvaluationPrompt, settings: dict[str, Any]) -> dict[str, Any]:
    """A prompt as servers take it: the arguments of earlier tool calls as JSON, its own template arguments on top."""
    body: dict[str, Any] = {**settings, "messages": [_with_json_arguments(message) for message in prompt.messages]}
    if prompt.tools:
        body["tools"] = prompt.tools
    if prompt.template_kwargs:
        body["chat_template_kwargs"] = {**settings.get("chat_template_kwargs", {}), **prompt.template_kwargs}
    return body


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [dict(call) for call in message["tool_calls"]]
    for call in calls:
        call["function"] = function = dict(call.get("function", call))
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments") or {})
    return {**message, "tool_calls": calls}


def _start_of(prompt: EvaluationPrompt) -> str:
    """The first words of a prompt's last message."""
    text = str(prompt.messages[-1].get("content"))
    return repr(text if len(text) <= 60 else text[:60] + "...")


# --- The acceptance length of a running vLLM or SGLang server, whatever method it speculates with.


Group: TypeAlias = tuple[str | None, str | None]


@dataclass(frozen=True)
class ServerReport:
    """What was measured on a server.

    Args:
        engine: "vllm" or "sglang".
        model: Its model.
        per_request: Whether the verifications are the answers' own, not the server's counters.
        answers: All answers.
        seconds: Time from the first request to the last answer.
        groups: Verifications by (source, language).
    """

    engine: str
    model: str
    per_request: bool
    answers: list[ServedAnswer]
    seconds: float
    groups: dict[tuple[str | None, str | None], Verifications]

    @property
    def verifications(self) -> Verifications:
        """All verifications."""
        return Verifications.total(self.groups.values())

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of the whole run."""
        return sum(answer.num_tokens for answer in self.answers) / self.seconds

    def summary(self) -> dict[str, Any]:
        """The figures in JSON types, by source and language too."""
        total = self.verifications
        return {
            "engine": self.engine,
            "model": self.model,
            "per_request": self.per_request,
            "acceptance_length": or_none(total.acceptance_length),
            "slot_acceptance": [count / total.forwards for count in total.by_slot],
            "forwards": total.forwards,
            "num_prompts": len(self.answers),
            "num_tokens": sum(answer.num_tokens for answer in self.answers),
            "tokens_per_second": self.tokens_per_second,
            "groups": [
                {"source": source, "language": language, "acceptance_length": or_none(part.acceptance_length)}
                for (source, language), part in self.groups.items()
            ],
        }


def measure_server(
    server: Server,
    prompts: Sequence[EvaluationPrompt],
    settings: dict[str, Any],
    concurrency: int = 1,
    progress: bool = True,
    keep: Callable[[ServerReport], None] | None = None,
) -> ServerReport:
    """Let a server answer prompts and report its acceptance length.

    Args:
        server: The server.
        prompts: The prompts; those of one source and language are asked together.
        settings: Fields of the requests, such as `max_tokens` and `temperature`.
        concurrency: Requests at a time. The acceptance length does not depend on it, tokens per second do.
        progress: Show a bar.
        keep: Called with the report so far after each source and language, and with what was answered before an error
            or an interrupt.

    Raises:
        ServerError: When the server counts nothing or anew, breaks off, or takes too long.
        ValueError: When there is no prompt or no request at a time.
    """
    if not prompts or concurrency < 1:
        raise ValueError(f"There are {len(prompts)} prompts and concurrency is {concurrency}; expected at least 1.")
    by_group: dict[Group, list[EvaluationPrompt]] = {}
    for prompt in prompts:
        by_group.setdefault((prompt.source, prompt.language), []).append(prompt)
    report = ServerReport(server.engine, server.model, True, [], 0.0, {})
    with tqdm(total=len(prompts), desc="asking", unit="prompt", disable=not progress) as bar:
        for key, group in by_group.items():
            before, start, own, whole = _counters(server), time.perf_counter(), [], False
            try:
                with closing(_asked(server, group, settings, concurrency)) as asked:
                    for answer in asked:
                        own.append(answer)
                        bar.update()
                whole = True
            finally:
                seconds = time.perf_counter() - start
                report = _with_group(server, report, key, own, before, seconds, whole)
                if keep is not None and report.answers:
                    keep(report)
    _check_counts(server, report)
    return report


def _asked(
    server: Server, prompts: Sequence[EvaluationPrompt], settings: dict[str, Any], concurrency: int
) -> Generator[ServedAnswer, None, None]:
    """Answers in the order of their prompts; when it ends no request runs, so that the counters stand still."""
    stopped = threading.Event()

    def ask(prompt: EvaluationPrompt) -> ServedAnswer:
        if stopped.is_set():
            raise ServerError("Not asked, since a request before has failed.")
        try:
            return server.ask(prompt, settings)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(concurrency) as pool:
        try:
            yield from pool.map(ask, prompts)
        finally:
            stopped.set()


def _with_group(
    server: Server,
    report: ServerReport,
    key: Group,
    answers: list[ServedAnswer],
    before: Verifications | ServerError,
    seconds: float,
    whole: bool,
) -> ServerReport:
    """The report with a group of answers, or as it was where answers before an error cannot be counted."""
    try:
        counted, per_request = _verifications(server, answers, before) if answers else (Verifications(), True)
    except ServerError as error:
        if whole:
            raise
        logger.warning(f"{len(answers)} answers before an error are left out, since they cannot be counted: {error}")
        return report
    return replace(
        report,
        per_request=report.per_request and per_request,
        answers=report.answers + answers,
        seconds=report.seconds + seconds,
        groups={**report.groups, key: counted} if answers else report.groups,
    )


def plain_tokens_per_second(
    server: Server,
    prompts: Sequence[EvaluationPrompt],
    settings: dict[str, Any],
    concurrency: int = 1,
    progress: bool = True,
) -> float:
    """Generated tokens per second of a server that need not speculate; arguments as for [`measure_server`]."""
    start = time.perf_counter()
    with closing(_asked(server, prompts, settings, concurrency)) as asked:
        bar = tqdm(asked, total=len(prompts), desc="asking plainly", unit="prompt", disable=not progress)
        num_tokens = sum(answer.num_tokens for answer in bar)
    return num_tokens / (time.perf_counter() - start)


def _counters(server: Server) -> Verifications | ServerError:
    """The counters, or why there are none: answers may bring their own."""
    try:
        return server.settled_counters()
    except ServerError as error:
        return error


def _verifications(
    server: Server, answers: list[ServedAnswer], before: Verifications | ServerError
) -> tuple[Verifications, bool]:
    """What a group of answers took, and whether the answers themselves say so."""
    # An answer of one token has no verification to tell of.
    own = [answer.verifications for answer in answers if answer.verifications is not None]
    if own and len(own) >= sum(answer.num_tokens > 1 for answer in answers):
        return Verifications.total(own), True
    if isinstance(before, ServerError):
        raise before
    after = server.settled_counters()
    if after.went_back(before):
        raise ServerError(
            f"The counters of {server.url} went back, from {before.forwards:.0f} verifications to "
            f"{after.forwards:.0f} and from {before.accepted:.0f} accepted drafts to {after.accepted:.0f}: the server "
            "was restarted or its counters were reset meanwhile. Measure again."
        )
    return after.since(before), False


def _check_counts(server: Server, report: ServerReport) -> None:
    """Refuse a run without verifications; warn where the counters hold more or less than these answers."""
    total, tokens = report.verifications, [answer.num_tokens for answer in report.answers]
    committed = sum(max(0, count - 1) for count in tokens)
    if total.forwards <= 0:
        raise ServerError(
            f"{server.url} wrote {sum(tokens)} tokens and verified no draft: speculation is set up but was not used "
            "(servers switch it off for some settings and batch sizes). See its log."
        )
    # The last block of an answer is counted whole, though the answer may end inside it.
    most = committed + len(report.answers) * max(len(total.by_slot), 16)
    if not report.per_request and not 0.9 * committed <= total.forwards + total.accepted <= most:
        logger.warning(
            f"The counters of {server.url} hold {total.forwards + total.accepted:.0f} verified tokens, the answers "
            f"{committed}: other requests were served meanwhile, or part of the tokens without speculation."
        )


# --- Asking an OpenAI-compatible server (vLLM, SGLang) for chat completions: many at once, each until it is answered.


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
