# SPDX-License-Identifier: Apache-2.0
"""Chats become documents: token ids, and the spans of them that the target itself has generated.

A row is `{"messages": [...]}` with, optionally, `tools` (a list or its JSON string), `finish_reason` ("length" where
the last answer was cut off) and `completion_token_ids` (the last answer as the target generated it). A document is
`{"input_ids": [...], "supervised_spans": [[start, stop]]}`, half-open: the prompt exactly as at inference, then one
answer, encoded apart from the prompt because generated tokens never merge with it.
"""

import gzip
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from datasets import Dataset, Features, List, Value, concatenate_datasets
from jinja2 import TemplateError
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

SOURCE_KEY = "_source"
DOCUMENT_FEATURES = Features(
    {"input_ids": List(Value("int32")), "supervised_spans": List(List(Value("int32"))), "row": Value("int64")}
)
# Python lists of ids take many times the memory of Arrow's, so they are handed over in portions.
DOCUMENTS_PER_PART = 1000


def read_completions(path: str | os.PathLike, on_error: Literal["raise", "skip"] = "raise") -> list[dict]:
    """Reads the rows of a `.jsonl` or `.jsonl.gz` file, or of all such files directly in a folder, in sorted order.

    Args:
        path: File or folder. Blank lines are passed over.
        on_error: What to do with a line that is not a JSON object: "raise", or "skip" it with a warning.

    Returns:
        One dict per line, with "file:line" under the key `_source` so that later errors can name the place.

    Raises:
        FileNotFoundError: No such path, or a folder without such files.
        ValueError: A broken line, or no row at all.
    """
    _check_on_error(on_error)
    rows: list[dict] = []
    num_skipped = 0
    for file in _completion_files(Path(path)):
        for item in _parse_file(file):
            if isinstance(item, dict):
                rows.append(item)
            elif on_error == "raise":
                raise item
            else:
                num_skipped += 1
                logger.warning("Skipped a line. %s", item)
    if num_skipped:
        logger.warning("%s: skipped %d broken lines and kept %d rows.", path, num_skipped, len(rows))
    if not rows:
        raise ValueError(f"{path} holds no row ({num_skipped} broken lines skipped): give one JSON object per line.")
    return rows


def tokenize_conversation(
    row: dict,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    enable_thinking: bool | None = None,
    eos_token_ids: int | Iterable[int] | None = None,
) -> list[dict[str, list]]:
    """Turns one chat into one document per assistant turn, by the tokenizer's own chat template.

    Args:
        row: A chat, see the top of this file.
        tokenizer: The target's tokenizer, with its chat template.
        max_length: Tokens of a document that are kept; an answer that lies wholly beyond gives no document.
        enable_thinking: Handed to the template unless None; the value the answers were generated with.
        eos_token_ids: Ids that end a turn besides `tokenizer.eos_token_id`: those of the target's generation config.

    Returns:
        Documents `{"input_ids": [...], "supervised_spans": [[start, stop]]}` in the order of the turns.

    Raises:
        ValueError: Something in the row, or what the template makes of it, cannot be used; names the row's place.
    """
    _check_max_length(max_length)
    chat = _ChatFormat.of(tokenizer, enable_thinking, eos_token_ids)
    try:
        turns = chat.turns(row)
    except ValueError as error:
        raise ValueError(f"{_row_name(row)}: {error}") from error
    return [document for turn in turns if (document := turn.document(max_length))]


def tokenize_completions(
    rows: Iterable[dict],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    enable_thinking: bool | None = None,
    eos_token_ids: int | Iterable[int] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    disable_tqdm: bool = False,
) -> Dataset:
    """Turns chats into a dataset with the columns `input_ids`, `supervised_spans` and `row` (index of the chat).

    Args:
        rows: Chats, as `read_completions` or a `datasets.Dataset` gives them.
        tokenizer, max_length, enable_thinking, eos_token_ids: As in `tokenize_conversation`.
        on_error: What to do with a chat that cannot be used: "raise", or "skip" it with a warning.
        disable_tqdm: Whether to hide the progress bar.

    Raises:
        ValueError: A chat that cannot be used, named by index and place; or no document at all.
    """
    _check_on_error(on_error)
    _check_max_length(max_length)
    chat = _ChatFormat.of(tokenizer, enable_thinking, eos_token_ids)
    parts: list[Dataset] = []
    documents: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    template_texts: Counter[str] = Counter()
    for index, row in enumerate(tqdm(rows, desc="Tokenizing", unit=" chats", disable=disable_tqdm)):
        counts["rows"] += 1
        try:
            turns = chat.turns(row)
        except ValueError as error:
            if on_error == "raise":
                raise ValueError(f"{_row_name(row, index)}: {error}") from error
            counts["skipped"] += 1
            logger.warning("Skipped %s: %s", _row_name(row, index), error)
            continue
        kept = [document for turn in turns if (document := turn.document(max_length))]
        documents += [{**document, "row": index} for document in kept]
        counts["dropped"] += len(turns) - len(kept)
        template_texts.update(turn.template_text for turn in turns if turn.template_text)
        if len(documents) >= DOCUMENTS_PER_PART:
            parts.append(Dataset.from_list(documents, features=DOCUMENT_FEATURES))
            documents = []
    if documents:
        parts.append(Dataset.from_list(documents, features=DOCUMENT_FEATURES))
    _report(counts, template_texts, max_length, nothing_left=not parts)
    return concatenate_datasets(parts)


def _report(counts: Counter[str], template_texts: Counter[str], max_length: int | None, nothing_left: bool) -> None:
    skipped = f"skipped {counts['skipped']} of {counts['rows']} chats"
    dropped = f"dropped {counts['dropped']} answers that are empty or lie wholly beyond max_length={max_length}"
    if nothing_left:
        raise ValueError(
            f"No document is left to train on: {skipped}, {dropped}. Give chats that hold answers of the target, and "
            "a max_length above the length of their prompts."
        )
    if counts["skipped"]:
        logger.warning("Tokenizing %s; each has its own warning above.", skipped)
    if counts["dropped"]:
        logger.warning("Tokenizing %s.", dropped)
    for text, _ in template_texts.most_common(1):
        logger.warning(
            "In %d answers the template wrote text of its own before the content, most often %r; it is supervised as "
            "generated text. If the target did not generate it, pass the enable_thinking the answers were generated "
            "with, or give `completion_token_ids`.",
            template_texts.total(),
            text,
        )


@dataclass(frozen=True)
class _Turn:
    """One assistant turn in token ids, and what text the template put before the message's own."""

    prompt_ids: list[int]
    answer_ids: list[int]
    template_text: str = ""

    def document(self, max_length: int | None) -> dict[str, list] | None:
        input_ids = (self.prompt_ids + self.answer_ids)[:max_length]
        start = len(self.prompt_ids)
        if len(input_ids) <= start:
            return None
        return {"input_ids": input_ids, "supervised_spans": [[start, len(input_ids)]]}


@dataclass(frozen=True)
class _ChatFormat:
    """The target's chat template and tokens, as its server uses them."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: dict[str, Any]
    end_ids: frozenset[int]

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        enable_thinking: bool | None,
        eos_token_ids: int | Iterable[int] | None,
    ) -> "_ChatFormat":
        if not tokenizer.chat_template:
            raise ValueError(
                "The tokenizer has no chat template, so the target's prompts cannot be rebuilt: use the tokenizer of "
                "an instruction-tuned target, or set tokenizer.chat_template."
            )
        extra = [eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids or [])
        end_ids = frozenset(i for i in (tokenizer.eos_token_id, *extra) if i is not None)
        if not end_ids:
            raise ValueError("The tokenizer has no eos token, so no turn has an end: pass eos_token_ids.")
        return cls(tokenizer, {} if enable_thinking is None else {"enable_thinking": enable_thinking}, end_ids)

    def turns(self, row: dict) -> list[_Turn]:
        if not isinstance(row, dict):
            raise ValueError(f"a chat must be a dict with `messages`, got {type(row).__name__}.")
        messages = _clean_messages(row.get("messages"))
        tools = _clean_tools(row.get("tools"))
        completion_ids = _completion_ids(row.get("completion_token_ids"))
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            roles = [message["role"] for message in messages]
            raise ValueError(f"no message has the role 'assistant', so nothing can be learnt: the roles are {roles}.")
        if answers[0] == 0:
            raise ValueError("the first message is the assistant's: an answer needs a message before it.")
        turns = []
        for i in answers:
            is_last = i == answers[-1]
            prompt = self.render(messages[:i], tools, add_generation_prompt=True)
            if is_last and completion_ids is not None:
                turns.append(_Turn(self.encode(prompt), completion_ids))
                continue
            answer = self.answer_text(prompt, messages[: i + 1], tools)
            is_truncated = is_last and row.get("finish_reason") == "length"
            answer_ids = self.answer_ids(answer, messages[i], is_truncated)
            turns.append(_Turn(self.encode(prompt), answer_ids, _template_text(answer, messages[i])))
        return turns

    def render(self, messages: list[dict], tools: list | None, add_generation_prompt: bool) -> str:
        kwargs = {"tools": tools, "add_generation_prompt": add_generation_prompt, **self.template_kwargs}
        try:
            return cast(str, self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))
        # A template fails with Jinja's errors or with those of the Python operations in it.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                f"the chat template failed on the first {len(messages)} messages "
                f"({type(error).__name__}: {error}): give the messages the form that this template expects."
            ) from error

    def answer_text(self, prompt: str, messages: list[dict], tools: list | None) -> str:
        """What the template writes after the prompt once the last message, the answer, is there (case DT1)."""
        full = self.render(messages, tools, add_generation_prompt=False)
        if full.startswith(prompt):
            return full[len(prompt) :]
        pairs = zip(prompt, full, strict=False)
        at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(full)))
        begin = max(0, at - 20)
        raise ValueError(
            "the rendered prompt is not the beginning of the rendered chat, so the answer's first token is unknown: "
            f"at character {at} the prompt has {prompt[begin : at + 40]!r}, the chat {full[begin : at + 40]!r}. "
            "Pass the enable_thinking the answers were generated with, or give `completion_token_ids`."
        )

    def answer_ids(self, answer: str, message: dict, is_truncated: bool) -> list[int]:
        """Ids up to the first that ends a turn, where generation stops; a truncated answer ends before it."""
        own = _last_own_text(message)
        if is_truncated and own and own in answer:
            # What the template closes the text with, such as the end of a thinking block, was not generated either.
            return self.encode_apart(answer[: answer.rindex(own) + len(own)])
        ids = self.encode_apart(answer)
        end = next((k for k, token_id in enumerate(ids) if token_id in self.end_ids), None)
        if end is None:
            raise ValueError(
                f"the rendered answer ends in {answer[-40:]!r}, which holds none of the ids {sorted(self.end_ids)} "
                "that end a turn: pass the target's end-of-turn ids as eos_token_ids, or, where its template writes "
                "none, give `completion_token_ids`."
            )
        return ids[: end if is_truncated else end + 1]

    def encode(self, text: str) -> list[int]:
        # Half a surrogate pair, which JSON can spell, fails here with a ValueError that says where it is.
        text.encode("utf-8")
        # The template writes special tokens itself, and what is too long is cut later, so there is nothing to warn of.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode_apart(self, text: str) -> list[int]:
        """Ids of a text that follows other text, without the space that SentencePiece puts before a new text."""
        lead = self.encode("\n")
        if self.tokenizer.decode(lead + lead) != "\n\n":
            ids = self.encode("\n" + text)
            if ids[: len(lead)] == lead:
                return ids[len(lead) :]
        return self.encode(text)


def _last_own_text(message: dict) -> str:
    texts = [message.get(key) for key in ("content", "reasoning_content", "reasoning", "thinking")]
    return next((text.lstrip() for text in texts if isinstance(text, str) and text.strip()), "")


def _template_text(answer: str, message: dict) -> str:
    """Text other than blanks that stands before the content of a message that consists of content alone."""
    content = _last_own_text(message).rstrip()
    if message.keys() - {"role", "content", "name"} or content not in answer:
        return ""
    return answer.partition(content)[0].strip() if content else ""


def _clean_messages(messages: Any) -> list[dict]:
    """Messages without what Arrow fills in (case DT4): no None, `content` always there, arguments as dicts."""
    if messages is None:
        raise ValueError("the row has no `messages`: expected a list of {'role': ..., 'content': ...}.")
    if not isinstance(messages, list | tuple):
        raise ValueError(f"`messages` must be a list of dicts, got {type(messages).__name__}.")
    cleaned = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} must be a dict with a string `role`, got {str(message)[:80]!r}.")
        message = {"content": "", **_without_none(message)}
        # Some templates ask only whether the key is there, so an empty list must not stay.
        if tool_calls := message.pop("tool_calls", None):
            if not isinstance(tool_calls, list):
                raise ValueError(f"message {i}: `tool_calls` must be a list, got {type(tool_calls).__name__}.")
            message["tool_calls"] = [_with_parsed_arguments(call, i) for call in tool_calls]
        cleaned.append(message)
    return cleaned


def _with_parsed_arguments(tool_call: Any, message_index: int) -> dict:
    if not isinstance(tool_call, dict):
        raise ValueError(f"message {message_index}: each of `tool_calls` must be a dict, got {str(tool_call)[:80]!r}.")
    if isinstance(tool_call.get("function"), dict):
        return {**tool_call, "function": _with_parsed_arguments(tool_call["function"], message_index)}
    if isinstance(tool_call.get("arguments"), str):
        try:
            arguments = json.loads(tool_call["arguments"])
        except json.JSONDecodeError:
            return tool_call
        if isinstance(arguments, dict):
            return {**tool_call, "arguments": arguments}
    return tool_call


def _clean_tools(tools: Any) -> list[dict] | None:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"`tools` is a string but not JSON ({error}): {tools[:80]!r}.") from error
    else:
        tools = _without_none(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"`tools` must be a list of dicts or the JSON string of one, got {str(tools)[:80]!r}.")
    return tools


def _completion_ids(ids: Any) -> list[int] | None:
    if ids is None:
        return None
    if not isinstance(ids, list | tuple) or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ValueError(f"`completion_token_ids` must be a list of token ids, got {str(ids)[:80]!r}.")
    return list(ids)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value


def _completion_files(path: Path) -> list[Path]:
    endings = (".jsonl", ".jsonl.gz")
    if not path.exists():
        raise FileNotFoundError(f"No such file or folder: {path}. Give a {' or '.join(endings)} file, or a folder.")
    if path.is_file():
        if not path.name.endswith(endings):
            raise ValueError(f"{path} ends in neither of {endings}, so its format is unknown.")
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(endings) and not file.name.startswith("."))
    if not files:
        raise FileNotFoundError(f"The folder {path} holds no file that ends in one of {endings}.")
    return files


def _parse_file(file: Path) -> Iterator[dict | ValueError]:
    """Rows in order; in the place of what is broken, the error that names file and line."""
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(line, f"{file}:{number}")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        yield ValueError(f"{file}:{number + 1}: not a whole gzip file ({error}): copy or write the file again.")


def _parse_line(line: bytes, source: str) -> dict | ValueError:
    try:
        row = json.loads(line)
    except ValueError as error:
        return ValueError(f"{source}: the line is not JSON ({error}): {line[:80]!r}.")
    if not isinstance(row, dict):
        return ValueError(f"{source}: expected a JSON object, got {type(row).__name__}: {line[:80]!r}.")
    return {**row, SOURCE_KEY: source}


def _row_name(row: Any, index: int | None = None) -> str:
    source = row.get(SOURCE_KEY) if isinstance(row, dict) else None
    name = "The row" if index is None else f"Row {index}"
    return f"{name} ({source})" if isinstance(source, str) else name


def _check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")


def _check_max_length(max_length: int | None) -> None:
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1 token, got {max_length}.")
