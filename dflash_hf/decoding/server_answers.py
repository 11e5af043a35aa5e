# SPDX-License-Identifier: Apache-2.0
"""What is in an answer of vLLM or SGLang, whole or in the chunks of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .server_counters import MAX_SLOTS, CountersMissing, Verifications, count_of


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


__all__ = ["AnswerContent", "MalformedAnswer", "answer_content", "own_verifications"]
