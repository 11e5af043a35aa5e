# SPDX-License-Identifier: Apache-2.0
"""From a chat to documents by the target's own chat template: token ids with supervised spans.

chat -> turns     one per answer: the prompt as at inference, and what the target then generated
     -> drafts    one per turn, or turns merged where a prompt goes on from the turn before
     -> documents input_ids int32 [T], supervised_spans: half-open [start, stop) ranges that the target generated
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .chats import REASONING_KEYS, Chat, RowError, nesting_limited


# Stands for the end of a turn that an answer only speaks of; no text holds this character, which is reserved.
HIDDEN = "\ufdd0"
# Characters of a conversation: more than any target reads, and what a tokenizer takes gigabytes for.
LARGEST_TEXT = 10_000_000
# A template fails with Jinja's errors or with those of the Python operations in it.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
# What a template is given to see how it reads messages.
PROBE = "probe"


@dataclass(frozen=True)
class Piece:
    """Text or ids that are encoded by themselves."""

    content: str | list[int]
    is_supervised: bool
    # False for what begins a document.
    is_apart: bool = True


@dataclass(frozen=True)
class Turn:
    """One answer: the prompt, the answer's pieces, and what text the template put before the message's own."""

    # Its text, or the ids that a server was given.
    prompt: str | list[int]
    pieces: list[Piece]
    # None where the answer's text does not tell its ids: then later turns cannot go on from it.
    answer: str | None
    is_truncated: bool = False
    template_text: str = ""


@dataclass(frozen=True)
class Draft:
    """One document before it is encoded."""

    pieces: list[Piece]
    is_truncated: bool


@dataclass(frozen=True)
class Document:
    """Token ids, int32 [T], and the half-open spans of them that the target generated."""

    input_ids: np.ndarray
    supervised_spans: list[list[int]]
    is_truncated: bool = False


def drafts_of(turns: Sequence[Turn], merge: bool) -> list[Draft]:
    """One draft per turn, or, with `merge`, one for each run of turns whose prompts go on from the turn before."""
    drafts: list[Draft] = []
    # The text of the last draft, up to which the next prompt must agree with it.
    so_far: str | None = None
    for turn in turns:
        if merge and so_far is not None and isinstance(turn.prompt, str) and turn.prompt.startswith(so_far):
            pieces = [*drafts.pop().pieces, Piece(turn.prompt[len(so_far) :], False), *turn.pieces]
        else:
            pieces = [Piece(turn.prompt, False, is_apart=False), *turn.pieces]
        drafts.append(Draft(pieces, turn.is_truncated))
        so_far = turn.prompt + turn.answer if isinstance(turn.prompt, str) and turn.answer is not None else None
    return drafts


def cut(document: Document, max_length: int) -> Document | None:
    """The first `max_length` tokens with what is supervised of them, or None where that is nothing."""
    if len(document.input_ids) <= max_length:
        return document
    spans = [[start, min(stop, max_length)] for start, stop in document.supervised_spans if start < max_length]
    return Document(document.input_ids[:max_length], spans, True) if spans else None


def windows(document: Document, length: int) -> list[Document]:
    """Documents that together supervise every token once: `length` more tokens each, behind all that precedes them."""
    documents = []
    total = len(document.input_ids)
    for begin in range(0, total, length):
        end = min(begin + length, total)
        spans = [[max(a, begin), min(b, end)] for a, b in document.supervised_spans if a < end and b > begin]
        if spans:
            documents.append(Document(document.input_ids[:end], spans, document.is_truncated or end < total))
    return documents


def _checked(text: str) -> str:
    """A text that can be encoded."""
    if len(text) > LARGEST_TEXT:
        raise RowError("text too long", f"the text has {len(text):,} characters, more than {LARGEST_TEXT:,}.")
    try:
        # Half a surrogate pair, which JSON can spell, fails here and not within a batch of other rows.
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("broken Unicode", f"the text is not valid Unicode ({error}).") from error
    return text


def _with_parts(message: dict) -> dict:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_text_arguments(message: dict) -> dict:
    def spelled(call: dict) -> dict:
        if "function" in call:
            return {**call, "function": spelled(call["function"])}
        arguments = call["arguments"]
        return {
            **call,
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        }

    return {**message, "tool_calls": [spelled(call) for call in message["tool_calls"]]}


# --- What belongs to one answer: its text, its thinking, and whether a template rendered all of it.


def own_thinking(message: dict) -> str:
    """The thinking that a message holds apart from its content."""
    return next((message[key] for key in REASONING_KEYS if message.get(key)), "")


def last_own_text(message: dict) -> str:
    """The text that a template writes last of a message: its content, or the thinking of one without content."""
    texts = [message.get(key) for key in ("content", *REASONING_KEYS)]
    return next((text.lstrip() for text in texts if text and text.strip()), "")


def with_thinking_apart(message: dict, prompt: str, is_truncated: bool) -> dict | None:
    """The message with the thinking that its content holds as `reasoning_content`, or None where it holds none."""
    content = message["content"]
    if own_thinking(message):
        return None
    if "</think>" in content:
        thinking, _, content = content.partition("</think>")
    # A cut-off answer without the closing tag is thinking, if it or the prompt opened a block.
    elif is_truncated and (content.lstrip().startswith("<think>") or prompt.rstrip().endswith("<think>")):
        thinking, content = content, ""
    else:
        return None
    thinking = thinking.rpartition("<think>")[2].strip("\n")
    return {**message, "content": content.lstrip("\n"), "reasoning_content": thinking}


def check_complete(message: dict, rendered: str) -> None:
    """Refuses an answer of which the template leaves out the thinking, the content or a tool call."""
    content, thinking = message["content"], own_thinking(message)
    if "</think>" in content:
        inline, _, content = content.rpartition("</think>")
        thinking = thinking or inline.rpartition("<think>")[2]
    lost = [(name, text.strip()) for name, text in (("thinking", thinking), ("content", content))]
    lost = [(name, text) for name, text in lost if text not in rendered]
    names = Counter(str(call.get("function", call).get("name", "")) for call in message.get("tool_calls", ()))
    lost += [("tool call", name) for name, count in names.items() if rendered.count(name) < count]
    for name, text in lost:
        what = "give `completion_token_ids`, or the template that the target was served with"
        raise RowError(f"{name} lost", f"the template leaves out the answer's {name}, {text[:60]!r}: {what}.")


def template_text(answer: str, message: dict) -> str:
    """Text other than blanks that stands before the content of a message that consists of content alone."""
    content = last_own_text(message).rstrip()
    if not content or message.keys() - {"role", "content", "name"} or content not in answer:
        return ""
    return answer.partition(content)[0].strip()


# --- The target's chat template and tokenizer: prompts as at inference, and what the target generated.


@dataclass(frozen=True)
class ChatFormat:
    """The target's chat template and tokens, as its server uses them."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: dict[str, Any]
    end_ids: frozenset[int]
    infer_thinking: bool = False

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Iterable[int] = (),
        infer_thinking: bool = False,
        **template_kwargs: Any,
    ) -> "ChatFormat":
        """The format of a tokenizer; template arguments that are None are not handed to the template.

        With `infer_thinking`, enable_thinking is True for an answer that holds thinking, and False for others.
        """
        if not tokenizer.chat_template:
            raise ValueError(
                "The tokenizer has no chat template: use that of an instruction-tuned target, or set "
                "tokenizer.chat_template."
            )
        end_ids = frozenset(i for i in (tokenizer.eos_token_id, *eos_token_ids) if i is not None)
        if not end_ids:
            raise ValueError("The tokenizer has no eos token, so no turn has an end: pass eos_token_ids.")
        given = {key: value for key, value in template_kwargs.items() if value is not None}
        return cls(tokenizer, given, end_ids, infer_thinking)

    @cached_property
    def end_texts(self) -> list[str]:
        """The texts that end a turn, ascending by id."""
        texts = (cast(str, self.tokenizer.decode([token_id])) for token_id in sorted(self.end_ids))
        return [text for text in texts if text]

    @cached_property
    def _end_pattern(self) -> re.Pattern:
        longest_first = sorted(self.end_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def turns(self, chat: Chat, last_only: bool = False) -> list[Turn]:
        """The answers of a chat that are to be learnt from, or the last of its answers alone.

        Raises:
            RowError: What the template makes of the chat cannot be used, or nothing of it is to be learnt from.
        """
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        learnt = [i for i in (answers[-1:] if last_only else answers) if i not in chat.untrained]
        if not learnt:
            raise RowError("not trained", "the row says of each answer that it is not to be learnt from.")
        with nesting_limited():
            return [self._turn(chat, i, i == answers[-1]) for i in learnt]

    def _turn(self, chat: Chat, index: int, is_last: bool) -> Turn:
        message = chat.messages[index]
        is_stopped = chat.stop_text is not None and chat.stop_text not in self.end_texts
        is_truncated = is_last and (chat.is_truncated or is_stopped)
        if chat.raw_prompt is not None:
            return self._raw_turn(chat, chat.raw_prompt, message, is_truncated)
        if self.infer_thinking:
            thinks = bool(own_thinking(message)) or "</think>" in message["content"]
            chat = replace(chat, template_kwargs={"enable_thinking": thinks, **chat.template_kwargs})
        prompt = self._render(chat, chat.messages[:index], add_generation_prompt=True)
        if is_last and chat.completion_ids is not None:
            return Turn(prompt, [Piece(chat.completion_ids, True)], None, is_truncated)
        apart = with_thinking_apart(message, prompt, is_truncated)
        try:
            turn = self._turn_of(chat, index, message, prompt, is_truncated)
        except RowError:
            if apart is None:
                raise
            return self._turn_of(chat, index, apart, prompt, is_truncated)
        # A template that does not know thinking within the content closes an empty thinking block before it.
        if turn.template_text and apart is not None:
            with suppress(RowError):
                return self._turn_of(chat, index, apart, prompt, is_truncated)
        return turn

    def _raw_turn(self, chat: Chat, prompt: str | list[int], message: dict, is_truncated: bool) -> Turn:
        """The answer to a request to /v1/completions, whose prompt a server encodes as it is, with special tokens."""
        if isinstance(prompt, str):
            prompt = cast(list[int], self.tokenizer(_checked(prompt), verbose=False)["input_ids"])
        if chat.completion_ids is not None:
            return Turn(prompt, [Piece(chat.completion_ids, True)], None, is_truncated)
        message, _ = self._hide_ends(message)
        text = _checked(message["content"] + (self.tokenizer.eos_token or self.end_texts[0]))
        return Turn(prompt, self._spelled_out(self._generated(text, message, is_truncated)), None, is_truncated)

    def _turn_of(self, chat: Chat, index: int, message: dict, prompt: str, is_truncated: bool) -> Turn:
        message, is_hidden = self._hide_ends(message)
        rendered = self._rendered_answer(chat, prompt, [*chat.messages[:index], message])
        check_complete(message, rendered)
        answer = self._generated(rendered, message, is_truncated)
        pieces = self._spelled_out(answer) if is_hidden else [Piece(answer, True)] if answer else []
        tells_ids = not is_hidden and not is_truncated
        return Turn(prompt, pieces, answer if tells_ids else None, is_truncated, template_text(answer, message))

    def _render(self, chat: Chat, messages: list[dict], add_generation_prompt: bool) -> str:
        kwargs = {**self.template_kwargs, **chat.template_kwargs, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._applied([self.spelled(message) for message in messages], tools=chat.tools, **kwargs)
        except TEMPLATE_ERRORS as error:
            what = f"the chat template failed on the first {len(messages)} messages ({type(error).__name__}: {error})."
            raise RowError("template failed", what) from error
        return _checked(text)

    def _applied(self, messages: list[dict], **kwargs: Any) -> str:
        return cast(str, self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))

    def spelled(self, message: dict) -> dict:
        """A message in the spelling that the template reads."""
        if "tool_calls" in message and self._wants_text:
            message = _with_text_arguments(message)
        return _with_parts(message) if self._wants_parts else message

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template leaves out or cannot read a content that is a text, but reads one of parts."""
        message = {"role": "user", "content": PROBE}
        return PROBE not in self._tried([message]) and PROBE in self._tried([_with_parts(message)])

    @cached_property
    def _wants_text(self) -> bool:
        """Whether the template reads the arguments of calls as text alone, and not as an object."""
        call = {"id": PROBE, "type": "function", "function": {"name": PROBE, "arguments": {"x": ""}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        texts = []
        for message in (answer, _with_text_arguments(answer)):
            messages = [{"role": "user", "content": ""}, message]
            texts.append(self._tried([_with_parts(m) if self._wants_parts else m for m in messages]))
        # Python's own words for an object are not what a target writes.
        return PROBE in texts[1] and (PROBE not in texts[0] or str({"x": ""}) in texts[0])

    def _tried(self, messages: list[dict]) -> str:
        """What the template writes, or nothing where it fails."""
        try:
            return self._applied(messages, **self.template_kwargs)
        except TEMPLATE_ERRORS:
            return ""

    def _rendered_answer(self, chat: Chat, prompt: str, messages: list[dict]) -> str:
        """What the template writes after the prompt once the last message, the answer, is there (case DT1)."""
        full = self._render(chat, messages, add_generation_prompt=False)
        if full.startswith(prompt):
            return full[len(prompt) :]
        pairs = zip(prompt, full, strict=False)
        at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(full)))
        begin = max(0, at - 20)
        raise RowError(
            "prompt is no prefix",
            "the rendered prompt is not the beginning of the rendered chat: "
            f"at character {at} the prompt has {prompt[begin : at + 40]!r}, the chat {full[begin : at + 40]!r}. "
            "Pass the enable_thinking the answers were generated with, or give `completion_token_ids`.",
        )

    def _generated(self, rendered: str, message: dict, is_truncated: bool) -> str:
        """The text up to the first end of a turn, where generation stops; a truncated answer ends before it."""
        end = self._end_pattern.search(rendered)
        own = last_own_text(message)
        written = rendered[: end.start() if end else None]
        if is_truncated and own and own in written:
            # What the template closes the text with, such as the end of a thinking block, was not generated either.
            start = written.rindex(own) if message["content"].strip() else written.index(own)
            return written[: start + len(own)]
        if end is None:
            raise RowError(
                "no end of turn",
                f"the rendered answer ends in {rendered[-40:]!r}, which holds none of the ids {sorted(self.end_ids)} "
                "that end a turn: pass those of the target as eos_token_ids, or give `completion_token_ids`.",
            )
        return rendered[: end.start() if is_truncated else end.end()]

    def _hide_ends(self, message: dict) -> tuple[dict, bool]:
        """The message with the ends of turns that its text only speaks of made unlike real ones.

        The model went on after them, so it spelled them out in ordinary tokens; one that ends the content is real.
        """
        texts = [message["content"], *(message[key] for key in (*REASONING_KEYS, "tool_calls") if key in message)]
        if not any(end in str(text) for text in texts for end in self.end_texts):
            return message, False
        content = message["content"].rstrip()
        real = next((end for end in self.end_texts if content.endswith(end)), "")
        hidden = {**message, "content": message["content"][: len(content) - len(real)]}
        hidden = {key: value if key == "role" else self._hidden(value) for key, value in hidden.items()}
        hidden["content"] += real
        return hidden, hidden != message

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            if HIDDEN in value:
                raise RowError("broken Unicode", f"the answer holds {HIDDEN!r}, which no text may hold.")
            for number, end in enumerate(self.end_texts):
                value = value.replace(end, f"{HIDDEN}{number}{HIDDEN}")
            return value
        if isinstance(value, dict):
            return {self._hidden(key): self._hidden(item) for key, item in value.items()}
        return [self._hidden(item) for item in value] if isinstance(value, list) else value

    def _spelled_out(self, answer: str) -> list[Piece]:
        """The answer with each hidden end of a turn as the ordinary tokens that spell it."""
        pieces = []
        for k, part in enumerate(re.split(f"{HIDDEN}(\\d+){HIDDEN}", answer)):
            if k % 2:
                text = self.end_texts[int(part)]
                spelled = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
                pieces.append(Piece(cast(list[int], spelled), True))
            elif part:
                pieces.append(Piece(part, True))
        return pieces

    def encode(self, drafts: Sequence[Draft]) -> list[Document]:
        """Documents of drafts, their texts encoded in one batch."""
        pieces = [piece for draft in drafts for piece in draft.pieces]
        lead = self._lead
        texts = [("\n" if lead and p.is_apart else "") + p.content for p in pieces if isinstance(p.content, str)]
        encoded = iter(self._encode_batch(texts))
        documents = []
        for draft in drafts:
            parts: list[np.ndarray] = []
            spans: list[list[int]] = []
            length = 0
            for piece in draft.pieces:
                ids = np.array(next(encoded) if isinstance(piece.content, str) else piece.content, dtype=np.int32)
                if lead and piece.is_apart and isinstance(piece.content, str):
                    ids = ids[len(lead) :]
                if piece.is_supervised and len(ids):
                    if spans and spans[-1][1] == length:
                        spans[-1][1] += len(ids)
                    else:
                        spans.append([length, length + len(ids)])
                parts.append(ids)
                length += len(ids)
            documents.append(Document(np.concatenate(parts), spans, draft.is_truncated))
        return documents

    @cached_property
    def _lead(self) -> list[int]:
        """Ids of a newline that is put before text within a document and cut off again, or none where nothing is lost.

        SentencePiece puts a space before a text, which text that follows other text must not get.
        """
        (lead,) = self._encode_batch(["\n"])
        return [] if self.tokenizer.decode(lead + lead) == "\n\n" else lead

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self.tokenizer.is_fast:
            backend = self.tokenizer.backend_tokenizer
            # What a tokenizer file says of cutting and padding is for a model's input, not for a corpus.
            backend.no_truncation()
            backend.no_padding()
            # It stays as the call before has set it.
            backend.encode_special_tokens = False
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        # The template writes special tokens itself, and what is too long is cut later, so there is nothing to warn of.
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
