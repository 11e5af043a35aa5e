# SPDX-License-Identifier: Apache-2.0
"""A running vLLM or SGLang server: its OpenAI-compatible API and its counters."""

import json
import time
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from .prompts import EvaluationPrompt
from .server_answers import MalformedAnswer, answer_content
from .server_counters import CountersMissing, Verifications, sglang_counters, vllm_counters
from .server_http import HttpClient, PageMissing, ServerError


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


__all__ = ["ServedAnswer", "Server", "ServerError"]
