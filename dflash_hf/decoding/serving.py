# SPDX-License-Identifier: Apache-2.0
"""The acceptance length of a running vLLM or SGLang server, whatever method it speculates with.

Prompts go through its OpenAI-compatible API. What it verified is taken from each answer where the server says so
there (vLLM with `--per-request-spec-decode-metrics summary`, SGLang always), else from the server's own counters
before and after: vLLM's `vllm:spec_decode_*` on `/metrics`; SGLang's `avg_spec_accept_length` on `/server_info`, a
mean since its start that `sglang:generation_tokens_total` (`--enable-metrics`) turns into counts. Counters are the
server's, so nobody else may use it meanwhile.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tqdm.auto import tqdm
from transformers.utils import logging

from .prompts import EvaluationPrompt
from .report import or_none
from .server_client import ServedAnswer, Server, ServerError
from .server_counters import Verifications


logger = logging.get_logger(__name__)

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


__all__ = ["Server", "ServerError", "ServerReport", "measure_server", "plain_tokens_per_second"]
