# SPDX-License-Identifier: Apache-2.0
"""A running vLLM or SGLang server: its OpenAI-compatible API and its counters."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .evaluation_prompts import EvaluationPrompt
from .server_counters import CountersMissing, Verifications, own_verifications, sglang_counters, vllm_counters


class ServerError(RuntimeError):
    """A server that cannot be measured; the message says why and what to do."""


class _NotFound(ServerError):
    """The server has no such page."""


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

    Raises:
        ServerError: When it does not answer, is neither of the two, or does not speculate although it must.
    """

    def __init__(self, url: str, timeout: float = 600.0, speculates: bool = True):
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout
        models = json.loads(self._get("/v1/models") or "{}").get("data") or [{"id": "default"}]
        self.model: str = models[0]["id"]
        self.engine = self._find_engine(speculates)

    def counters(self) -> Verifications:
        """What the server has verified since its start.

        Raises:
            ServerError: When it does not say.
        """
        page = self._get("/metrics", missing_ok=True)
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
        body = {"model": self.model, "messages": prompt.messages, **settings}
        # vLLM tells an answer's verifications behind its last token, SGLang in whole answers only.
        streams = self.engine == "vllm"
        body |= {"stream": True, "stream_options": {"include_usage": True}} if streams else {"return_meta_info": True}
        start, path = time.perf_counter(), "/v1/chat/completions"
        try:
            with self._open(path, json.dumps(body).encode()) as response:
                chunks = list(_events(response)) if streams else [json.load(response)]
        except TimeoutError as error:
            raise self._timed_out(path) from error
        seconds = time.perf_counter() - start
        errors = [chunk["error"] for chunk in chunks if "error" in chunk]
        usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
        if errors or usage is None:
            problem = f"an error: {errors[0]}" if errors else "an answer that breaks off before its `usage`"
            raise ServerError(f"{self.url} answered a prompt with {problem}. See the server's log.")
        own = [verifications for chunk in chunks if (verifications := own_verifications(chunk))]
        text = "".join(_text(chunk) for chunk in chunks)
        return ServedAnswer(prompt, text, usage["completion_tokens"], seconds, own[-1] if own else None)

    def _find_engine(self, speculates: bool) -> str:
        if "\nvllm:" in "\n" + (self._get("/metrics", missing_ok=True) or ""):
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

    def _server_info(self) -> dict[str, Any] | None:
        # Older releases know the longer name alone.
        text = self._get("/server_info", missing_ok=True) or self._get("/get_server_info", missing_ok=True)
        return None if text is None else json.loads(text)

    def _get(self, path: str, missing_ok: bool = False) -> str | None:
        try:
            with self._open(path) as response:
                return response.read().decode()
        except _NotFound:
            if missing_ok:
                return None
            raise
        except TimeoutError as error:
            raise self._timed_out(path) from error

    def _open(self, path: str, data: bytes | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            return urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            kind = _NotFound if error.code == 404 else ServerError
            raise kind(f"{self.url}{path} answered with status {error.code}: {text}") from error
        except TimeoutError as error:
            raise self._timed_out(path) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._timed_out(path) from error
            raise ServerError(
                f"{self.url} cannot be reached ({error.reason}). Start the server, or correct the address."
            ) from error

    def _timed_out(self, path: str) -> ServerError:
        return ServerError(
            f"{self.url}{path} gave nothing for {self.timeout:g} seconds. See the server's log, or raise the timeout."
        )


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event."""
    for line in response:
        text = line.decode().strip()
        if text.startswith("data:") and text != "data: [DONE]":
            yield json.loads(text.removeprefix("data:"))


def _text(chunk: dict[str, Any]) -> str:
    """What a chunk adds to the answer, reasoning included."""
    messages = [choice.get("delta") or choice.get("message") or {} for choice in chunk.get("choices") or []]
    names = ("reasoning_content", "reasoning", "content")
    return "".join(message.get(name) or "" for message in messages for name in names)


__all__ = ["ServedAnswer", "Server", "ServerError"]
