# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible servers (vLLM, SGLang): their answers, their counters, the acceptance length they reach.

One HTTP client asks them all. [`Server`] measures: an engine says what its verifications accepted, in counters since
its start or in each answer. [`CompletionServer`] collects answers: many at once, each asked until it is answered.
"""

import json
import math
import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from itertools import islice, zip_longest
from typing import Any, TypeAlias

import httpx2
from tqdm.auto import tqdm
from transformers.utils import logging

from .prompts import EvaluationPrompt


logger = logging.get_logger(__name__)

Group: TypeAlias = tuple[str | None, str | None]

# Statuses below 500 to which a later request may get a better answer.
RETRIED_STATUSES = (408, 409, 425, 429)
LONGEST_WAIT = 60.0
# Servers may ask for more patience, but not for days.
LONGEST_RETRY_AFTER = 600.0
# So many prompts in a row may fail by themselves after others were answered.
FEWEST_FAILURES = 8

# What reading a page or an answer raises that lacks something, or has another form than vLLM's and SGLang's.
OTHER_FORM = (AttributeError, LookupError, TypeError, ValueError)

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')


class ServerError(RuntimeError):
    """A server cannot be asked or measured; the message says why and what to do."""


class UnusableAddress(ServerError, ValueError):
    """No server can be asked with this address or key."""


class StatusError(ServerError):
    """A server answered with the status of an error."""

    def __init__(self, address: str, response: httpx2.Response):
        self.status, self.retry_after = response.status_code, response.headers.get("Retry-After")
        try:
            text = next(response.iter_bytes(), b"")[:500].decode(errors="replace")
        # The status counts, also where its text does not come.
        except httpx2.HTTPError:
            text = ""
        # Some gateways repeat the key that they refuse.
        if key := response.request.headers.get("Authorization", "").removeprefix("Bearer "):
            text = text.replace(key, "[key]")
        self.answer = f"status {self.status}: {text}"
        if self.status in (401, 403):
            self.answer += " Put the server's key into the environment variable OPENAI_API_KEY."
        if 300 <= self.status < 400:
            location = response.headers.get("Location")
            self.answer += f" It redirects to {location}: if that is the server, give its address."
        super().__init__(f"{address} answered with {self.answer}")


class AnswerError(RuntimeError):
    """A prompt stays unanswered; the message says what the server did."""


class RefusedError(AnswerError):
    """The server answers, but not this prompt."""


def _json_object(text: bytes) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text[:80]!r}")
    return value


def _model_names(page: bytes) -> list[str]:
    return [model["id"] for model in _json_object(page).get("data") or []]


def _events(stream: bytes) -> list[dict[str, Any]]:
    # Only these line ends: texts may hold others, such as U+2028, as they are.
    data = [line.removeprefix(b"data:").strip() for line in stream.split(b"\n") if line.startswith(b"data:")]
    return [_json_object(text) for text in data if text != b"[DONE]"]


class HttpClient:
    """Asks one server; the environment variable `OPENAI_API_KEY` holds its key if it has one.

    `timeout` are the seconds without a byte after which a request has failed, and those that a page or each event of a
    stream may take. [`UnusableAddress`] says that the address or the key cannot be used, and repeats no secret.
    """

    def __init__(self, url: str, timeout: float):
        _check_address(url)
        # Files of variables often leave a line end on the last value.
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UnusableAddress("OPENAI_API_KEY holds characters that no HTTP header may hold: set it again.")
        self.url, self.timeout = url, timeout
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        # Redirects would carry the key to another host, and a connection kept open may die between two requests.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._client = httpx2.Client(headers=headers, timeout=timeout, limits=limits, follow_redirects=False)

    def ask(
        self, path: str, body: Mapping[str, Any] | None = None, parse: Callable[[bytes], Any] = _json_object
    ) -> Any:
        """What `parse` makes of a page, or of the answer to a body; it raises a ValueError for another form."""
        address, content = self.url + path, None if body is None else json.dumps(body).encode()
        try:
            with self._client.stream("GET" if body is None else "POST", address, content=content) as response:
                if not response.is_success:
                    raise StatusError(address, response)
                return parse(self._content(response))
        except (TimeoutError, httpx2.TimeoutException) as error:
            said = f"gave no answer within {self.timeout:g} seconds: see its log, or raise the timeout"
            raise ServerError(f"{address} {said}.") from error
        except httpx2.ConnectError as error:
            raise ServerError(f"{self.url} cannot be reached ({error}): start the server.") from error
        except httpx2.HTTPError as error:
            raise ServerError(f"{address} broke off ({type(error).__name__}: {error}). See its log.") from error
        except OTHER_FORM as error:
            raise ServerError(
                f"{address} did not answer with the JSON or text of vLLM and SGLang ({error}). Give the engine's own "
                "address, not a gateway's."
            ) from error

    def _content(self, response: httpx2.Response) -> bytes:
        """All of a response; a server that dribbles on without end is not waited for."""
        content, end = bytearray(), time.monotonic() + self.timeout
        for part in response.iter_bytes():
            content += part
            # Comments keep a connection alive behind which nothing is written any more: only events count.
            if b"data:" in part:
                end = time.monotonic() + self.timeout
            if time.monotonic() > end:
                raise TimeoutError
        return bytes(content)


def _check_address(url: str) -> None:
    """Refuse what is not the address of a server, before anything waits for an answer from there."""
    # The address stands in messages and logs, so this one is not repeated.
    if "@" in url or "?" in url:
        raise UnusableAddress("The server's address holds credentials or a query: give the key as OPENAI_API_KEY.")
    try:
        parts = httpx2.URL(url)
        is_usable = bool(parts.host) and parts.scheme in ("http", "https") and " " not in url
    except httpx2.InvalidURL:
        is_usable = False
    if not is_usable:
        raise UnusableAddress(f"{url!r} is not an address of a server; give one such as http://localhost:8000.")


def _at_once(
    ask: Callable[[Any], Any], numbered: Iterable[tuple[int, Any]], concurrency: int, waits: bool
) -> Generator[tuple[int, Future], None, None]:
    """Numbers and results of requests as they come, at most `concurrency` at once.

    Whoever closes it early starts no further one and, where it `waits`, stays until none runs.
    """
    remaining, threads = iter(numbered), ThreadPoolExecutor(concurrency)
    pending: dict[Future, int] = {}
    try:
        while True:
            for number, request in islice(remaining, concurrency - len(pending)):
                pending[threads.submit(ask, request)] = number
            if not pending:
                return
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                yield pending.pop(future), future
    finally:
        threads.shutdown(wait=waits, cancel_futures=True)


# --- What vLLM and SGLang say about the drafts that they verified: in metrics since their start, or in an answer.


def or_none(value: float) -> float | None:
    """A number as JSON can hold it: None for nan."""
    return None if math.isnan(value) else value


@dataclass(frozen=True)
class Verifications:
    """Verification forwards of the target, the drafts that they accepted, and how many accepted slot 1, 2, .. each.

    `by_slot` is empty where the server does not tell.
    """

    forwards: float = 0
    accepted: float = 0
    by_slot: list[float] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Accepted drafts and the target's own token, per forward; nan without any forward."""
        return 1 + self.accepted / self.forwards if self.forwards else math.nan

    def since(self, before: "Verifications") -> "Verifications":
        """What came after an earlier count; a number below 0 says that the counts began anew."""
        by_slot = [new - old for new, old in zip_longest(self.by_slot, before.by_slot, fillvalue=0)]
        return Verifications(self.forwards - before.forwards, self.accepted - before.accepted, by_slot)

    @staticmethod
    def total(parts: Iterable["Verifications"]) -> "Verifications":
        """The sum over some parts."""
        parts = list(parts)
        by_slot = [sum(counts) for counts in zip_longest(*(part.by_slot for part in parts), fillvalue=0)]
        return Verifications(sum(p.forwards for p in parts), sum(p.accepted for p in parts), by_slot)


def _samples(page: str) -> dict[str, list[tuple[str, float]]]:
    """Labels and values of a Prometheus text page, by name without the ending `_total`; nan where it has no number."""
    samples = defaultdict(list)
    for line in page.splitlines():
        if match := _SAMPLE.match(line):
            name, labels, text = match.groups("")
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            samples[name.removesuffix("_total")].append((labels, value))
    return samples


def _count(value: Any, name: str) -> float:
    """A count that a server gives under a name."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"it gives {str(value)[:40]!r} as {name}, where a count is expected. See its log.")
    return value


def _sum(samples: Mapping[str, list[tuple[str, float]]], name: str, advice: str) -> float:
    """A counter's sum over all engines behind one address."""
    if name not in samples:
        raise ValueError(f"its metrics lack {name}, {advice}")
    return sum(_count(value, name) for _, value in samples[name])


def _vllm_counters(page: str) -> Verifications:
    """What a vLLM server has verified since its start, from its `/metrics`."""
    samples, per_slot = _samples(page), "vllm:spec_decode_num_accepted_tokens_per_pos"
    advice = (
        "so it was started without speculation. Start it with --speculative-config (`dflash-hf validate DRAFTER` "
        "prints the command)."
    )
    by_slot: dict[int, float] = defaultdict(float)
    for labels, value in samples.get(per_slot, []):
        if position := _POSITION.search(labels):
            by_slot[int(position[1])] += _count(value, per_slot)
    forwards = _sum(samples, "vllm:spec_decode_num_drafts", advice)
    accepted = _sum(samples, "vllm:spec_decode_num_accepted_tokens", advice)
    return Verifications(forwards, accepted, [by_slot[k] for k in sorted(by_slot)])


def _sglang_counters(info: Mapping[str, Any], page: str) -> Verifications:
    """What an SGLang server has verified since its start.

    Its `/server_info` gives the mean acceptance length; numbers of tokens and requests in its `/metrics` make counts
    of it.
    """
    states = info.get("internal_states") or [{}]
    if len(states) > 1:
        raise ValueError(f"it runs {len(states)} data-parallel workers, whose means cannot be pooled. Run one.")
    length = _count(states[0].get("avg_spec_accept_length") or 0, "avg_spec_accept_length")
    if not length:
        return Verifications()
    samples = _samples(page)
    advice = "so there is no number of tokens to take off what was before. Start it with --enable-metrics."
    tokens, requests = (_sum(samples, f"sglang:{name}", advice) for name in ("generation_tokens", "num_requests"))
    # The first token of an answer is the prefill's.
    verified = tokens - requests
    return Verifications(verified / length, verified - verified / length)


def _answer_content(chunks: Sequence[Mapping[str, Any]]) -> tuple[str, int, Verifications | None]:
    """Text with its reasoning first, number of tokens, and own verifications if any, of an answer.

    `chunks` are those of a stream, or the whole answer as the only one.
    """
    usages = [usage for chunk in chunks if (usage := chunk.get("usage"))]
    if not usages:
        raise ValueError("it breaks off before its `usage`")
    num_tokens = int(_count(usages[-1]["completion_tokens"], "completion_tokens"))
    own = [verifications for chunk in chunks if (verifications := own_verifications(chunk))]
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    messages = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    names = ("reasoning_content", "reasoning", "content")
    text = "".join(message.get(name) or "" for message in messages for name in names)
    return text, num_tokens, own[-1] if own else None


def own_verifications(answer: Mapping[str, Any]) -> Verifications | None:
    """An answer's own verifications, from its JSON or the last chunk of its stream, where the engine gives them."""
    if vllm := (answer.get("metrics") or {}).get("speculative_decoding"):
        histogram = {int(accepted): count for accepted, count in (vllm.get("acceptance_histogram") or {}).items()}
        forwards, accepted = (_count(vllm[n], n) for n in ("num_spec_steps", "num_accepted_draft_tokens"))
        return Verifications(forwards, accepted, _at_least(histogram))
    choices = answer.get("choices") or [{}]
    sglang = answer.get("meta_info") or choices[0].get("meta_info") or {}
    if "spec_verify_ct" not in sglang:
        return None
    forwards = _count(sglang["spec_verify_ct"], "spec_verify_ct")
    tokens = _count(answer["usage"]["completion_tokens"], "completion_tokens")
    # The first token is the prefill's; each verification commits at least one.
    accepted = _count(tokens - 1 - forwards, f"the accepted drafts of {tokens} tokens in {forwards} verifications")
    return Verifications(forwards, accepted, _at_least(dict(enumerate(sglang.get("spec_accept_histogram") or []))))


def _at_least(histogram: Mapping[int, Any]) -> list[float]:
    """From the number of forwards that accepted 0, 1, .. drafts: those that accepted at least 1, 2, .."""
    counts = {accepted: _count(count, f"forwards with {accepted} accepted") for accepted, count in histogram.items()}
    most = max((accepted for accepted, count in counts.items() if count), default=0)
    return [sum(count for accepted, count in counts.items() if accepted >= k) for k in range(1, most + 1)]


# --- Measuring a server, whatever method it speculates with.


@dataclass(frozen=True)
class ServedAnswer:
    """What a server wrote to a prompt, its reasoning first.

    `num_tokens` are those that the server counts, `verifications` the answer's own where the server tells them, and
    `seconds` go from sending the request to the last token.
    """

    prompt: EvaluationPrompt
    text: str
    num_tokens: int
    verifications: Verifications | None
    seconds: float


class Server:
    """A running vLLM or SGLang server; the environment variable `OPENAI_API_KEY` holds its key if it has one.

    Its address may end in `/v1`. The model to ask is by default the first that it lists. A [`ServerError`] says that
    it does not answer, is neither of the two, lacks the model, or does not speculate although it must (`speculates`).
    """

    def __init__(self, url: str, timeout: float = 600.0, speculates: bool = True, model: str | None = None):
        self.url = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
        self._http = HttpClient(self.url, timeout)
        self.model = self._find_model(model)
        self.engine = "vllm" if "\nvllm:" in "\n" + (self._page("/metrics", bytes.decode) or "") else "sglang"
        info = {} if self.engine == "vllm" else self._page("/server_info")
        if info is None:
            raise ServerError(
                f"{self.url} has neither vLLM's metrics (/metrics with vllm:...) nor SGLang's /server_info, so it "
                "does not say what it verified. Give the address of the engine itself, not of a gateway before it."
            )
        if speculates and self.engine == "vllm":
            self.counters()
        elif speculates and not info.get("speculative_algorithm"):
            raise ServerError(
                f"{self.url} is an SGLang server without speculation. Start it with --speculative-algorithm "
                "(`dflash-hf validate DRAFTER` prints the command)."
            )

    def _find_model(self, wanted: str | None) -> str:
        # Adapters are listed behind the model that they adapt.
        names = self._http.ask("/v1/models", None, _model_names) or ["default"]
        if wanted not in (None, *names):
            raise ServerError(f"{self.url} serves {', '.join(names)}, not {wanted}.")
        if wanted is None and len(names) > 1:
            logger.warning(f"{self.url} serves {', '.join(names)}: {names[0]} is asked unless another is named.")
        return wanted or names[0]

    def _page(self, path: str, parse: Callable[[bytes], Any] = _json_object) -> Any:
        """A page of the server, or None where it has none."""
        try:
            return self._http.ask(path, None, parse)
        except StatusError as error:
            if error.status != 404:
                raise
        return None

    def counters(self) -> Verifications:
        """What the server has verified since its start."""
        page = self._page("/metrics", bytes.decode) or ""
        try:
            if self.engine == "vllm":
                return _vllm_counters(page)
            return _sglang_counters(self._page("/server_info") or {}, page)
        except OTHER_FORM as error:
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
        raise ServerError(f"The counters of {self.url} still rise two seconds after the last answer: others use it.")

    def counters_or_error(self) -> Verifications | ServerError:
        """The settled counters, or why there are none: answers may bring their own."""
        try:
            return self.settled_counters()
        except ServerError as error:
            return error

    def ask(self, prompt: EvaluationPrompt, settings: dict[str, Any]) -> ServedAnswer:
        """Let it answer one prompt; `settings` are fields of the request, such as `max_tokens` and `temperature`."""
        body = {"model": self.model, **request_body(prompt, settings)}
        asked = repr(str(prompt.messages[-1].get("content"))[:60])
        # vLLM tells an answer's verifications behind its last token, SGLang in whole answers only.
        streams = self.engine == "vllm"
        body |= {"stream": True, "stream_options": {"include_usage": True}} if streams else {"return_meta_info": True}
        path, start = "/v1/chat/completions", time.perf_counter()
        try:
            chunks = self._http.ask(path, body, _events) if streams else [self._http.ask(path, body)]
            seconds = time.perf_counter() - start
            if errors := [chunk["error"] for chunk in chunks if chunk.get("error")]:
                raise ValueError(f"an error, {errors[0]}")
            return ServedAnswer(prompt, *_answer_content(chunks), seconds)
        except ServerError as error:
            raise ServerError(f"{error} The prompt was {asked}.") from error
        except OTHER_FORM as error:
            raise ServerError(
                f"{self.url} answered {asked} in another form than vLLM and SGLang do: {error}. See its log, or give "
                "the engine's own address in place of a gateway's."
            ) from error

    def ask_all(
        self, prompts: Sequence[EvaluationPrompt], settings: dict[str, Any], concurrency: int, bar: tqdm
    ) -> tuple[list[ServedAnswer], BaseException | None]:
        """Answers in the order of their prompts, and the error or interrupt before which they came.

        When it ends no request runs, so that the counters stand still.
        """
        answers: dict[int, ServedAnswer] = {}
        error = None
        requests = _at_once(lambda prompt: self.ask(prompt, settings), enumerate(prompts), concurrency, waits=True)
        try:
            with closing(requests):
                for number, future in requests:
                    answers[number] = future.result()
                    bar.update()
        except BaseException as stop:
            error = stop
        return [answers[number] for number in sorted(answers)], error

    def verified(
        self, answers: Sequence[ServedAnswer], before: Verifications | ServerError
    ) -> tuple[Verifications, bool]:
        """What answers took, and whether they say so themselves; `before` are the counters, or why there were none."""
        # An answer of one token has no verification to tell of.
        own = [answer.verifications for answer in answers if answer.verifications is not None]
        if own and len(own) >= sum(answer.num_tokens > 1 for answer in answers):
            return Verifications.total(own), True
        if isinstance(before, ServerError):
            raise before
        after = self.settled_counters()
        new = after.since(before)
        if min(new.forwards, new.accepted, *new.by_slot) < 0:
            raise ServerError(
                f"The counters of {self.url} went back, from {before.forwards:.0f} verifications to "
                f"{after.forwards:.0f}: the server was restarted meanwhile. Measure again."
            )
        return new, False


def request_body(prompt: EvaluationPrompt, settings: dict[str, Any]) -> dict[str, Any]:
    """A prompt as servers take it: the arguments of earlier tool calls as JSON, its own template arguments on top."""
    # Whether an answer is to be learned is nothing to a server.
    messages = [{name: value for name, value in m.items() if name != "train"} for m in prompt.messages]
    body: dict[str, Any] = {**settings, "messages": messages}
    for message in body["messages"]:
        if "tool_calls" in message:
            message["tool_calls"] = [_with_json_arguments(call) for call in message["tool_calls"]]
    if prompt.tools:
        body["tools"] = prompt.tools
    if prompt.template_kwargs:
        body["chat_template_kwargs"] = {**settings.get("chat_template_kwargs", {}), **prompt.template_kwargs}
    return body


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", call))
    arguments = function.get("arguments")
    # A call without arguments is written as one of none, whichever way its row spells that.
    function["arguments"] = arguments if isinstance(arguments, str) and arguments else json.dumps(arguments or {})
    return {**call, "function": function}


@dataclass(frozen=True)
class ServerReport:
    """What was measured on a server."""

    engine: str  # "vllm" or "sglang"
    model: str
    per_request: bool  # whether the verifications are the answers' own, not the server's counters
    answers: list[ServedAnswer]
    seconds: float  # in which they were asked
    groups: dict[Group, Verifications]  # by source and language

    def with_group(
        self, answers: list[ServedAnswer], seconds: float, verifications: Verifications, per_request: bool
    ) -> "ServerReport":
        """The report with the answers to prompts of one more source and language."""
        key = answers[0].prompt.source, answers[0].prompt.language
        return replace(
            self,
            per_request=self.per_request and per_request,
            answers=self.answers + answers,
            seconds=self.seconds + seconds,
            groups={**self.groups, key: verifications},
        )

    @property
    def verifications(self) -> Verifications:
        """All verifications."""
        return Verifications.total(self.groups.values())

    @property
    def slot_acceptance(self) -> list[float]:
        """Share of the verifications that accept the draft of slot 1, 2, ..; empty where the server does not tell."""
        total = self.verifications
        return [count / total.forwards for count in total.by_slot]

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
            "slot_acceptance": self.slot_acceptance,
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

    A [`ServerError`] says that the server counts nothing or anew, breaks off, or takes too long.
    """
    if not prompts:
        raise ValueError("There is no prompt to ask.")
    by_group: dict[Group, list[EvaluationPrompt]] = defaultdict(list)
    for prompt in prompts:
        by_group[prompt.source, prompt.language].append(prompt)
    report = ServerReport(server.engine, server.model, True, [], 0.0, {})
    with tqdm(total=len(prompts), desc="asking", unit="prompt", disable=not progress) as bar:
        for group in by_group.values():
            before, start = server.counters_or_error(), time.perf_counter()
            answers, error = server.ask_all(group, settings, concurrency, bar)
            seconds = time.perf_counter() - start
            try:
                if answers:
                    report = report.with_group(answers, seconds, *server.verified(answers, before))
            except ServerError as uncounted:
                if error is None:
                    raise
                logger.warning(f"{len(answers)} answers before an error are left out, not being counted: {uncounted}")
            if keep is not None and report.answers:
                keep(report)
            if error is not None:
                raise error
    _check_counts(server, report)
    return report


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


def plain_tokens_per_second(
    server: Server, prompts: Sequence[EvaluationPrompt], settings: dict[str, Any], concurrency: int = 1
) -> float:
    """Generated tokens per second of a server that need not speculate; arguments as for [`measure_server`]."""
    start = time.perf_counter()
    with tqdm(total=len(prompts), desc="asking plainly", unit="prompt") as bar:
        answers, error = server.ask_all(prompts, settings, concurrency, bar)
    if error is not None:
        raise error
    return sum(answer.num_tokens for answer in answers) / (time.perf_counter() - start)


# --- Collecting answers: many at once, each asked until it is answered.


class CompletionServer:
    """A server and how patiently it is asked.

    Args:
        url: Base address, such as `http://127.0.0.1:8000/v1`.
        timeout: Seconds without a byte from the server after which a request is given up and sent again.
        retries: How often a request that fails is sent again: on connection errors, timeouts, 429 and 5xx.
        first_wait: Seconds before the first retry, doubled for each further one, unless the server says how long.

    Raises:
        ValueError: The address is not one of HTTP or holds credentials, or OPENAI_API_KEY cannot be sent.
    """

    def __init__(self, url: str, timeout: float = 1800.0, retries: int = 8, first_wait: float = 1.0):
        self.url, self.retries, self.first_wait = url, retries, first_wait
        self._http = HttpClient(url.rstrip("/"), timeout)

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The first choice of the answer to a chat completion request, with the answer's `usage`.

        Raises:
            AnswerError: The server refuses the request, or has failed `retries` + 1 times.
        """
        failure = ""
        for attempt in range(self.retries + 1):
            pause = min(LONGEST_WAIT, self.first_wait * 2**attempt) * random.uniform(0.75, 1.25)
            try:
                answer = self._http.ask("/chat/completions", body)
                choice = answer["choices"][0]
                if not dict(choice["message"]):
                    raise ValueError("an empty message")
                return {**choice, "usage": answer.get("usage") or {}}
            except StatusError as error:
                failure = error.answer
                if error.status < 500 and error.status not in RETRIED_STATUSES:
                    raise RefusedError(f"the server refused the request ({failure})") from error
                pause = _retry_after(error.retry_after) or pause
            except ServerError as error:
                failure = f"this: {error}"
            except OTHER_FORM as error:
                failure = f"another form than a chat completion's ({error!r}): {str(answer)[:200]}"
            if attempt < self.retries:
                time.sleep(pause)
        raise AnswerError(f"the server failed {self.retries + 1} times, the last time with {failure}")

    def answer_all(
        self, bodies: Iterable[tuple[int, Mapping[str, Any]]], concurrency: int
    ) -> Iterator[tuple[int, dict[str, Any] | AnswerError]]:
        """Answers to numbered requests in the order they come, at most `concurrency` asked at once.

        Raises:
            AnswerError: Nothing was answered from the start while as many requests failed as are asked at once, or
                the server, once it had answered, let as many fail one after the other: it is gone.
        """
        failed_in_a_row, has_answered = 0, False
        # Whoever stops early does not wait for answers that may take half an hour.
        with closing(_at_once(self.answer, bodies, concurrency, waits=False)) as requests:
            for number, future in requests:
                error = future.exception()
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
