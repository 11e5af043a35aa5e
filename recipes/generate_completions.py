# SPDX-License-Identifier: Apache-2.0
"""Let the target answer prompts itself: a drafter learns from text that its own target wrote.

    python recipes/generate_completions.py --target FOLDER_OR_ID --prompts prompts.jsonl --output completions.jsonl
    python recipes/generate_completions.py --server http://127.0.0.1:8000/v1 --target NAME_ON_THE_SERVER ...

A prompt is a row `{"prompt": "..."}` or `{"messages": [...]}`, read from all that training data is read from: JSON
lines or one JSON list, compressed or not, Parquet, a folder or an address of such files. The row of a server's log,
`{"request": {...}, "response": {...}}`, is answered again: its messages, tools and chat_template_kwargs are asked, and
what else stands in the request (its model, its sampling) gives way to the options of this command. A chat that ends in
an answer is refused unless `--drop_answers true` says that it is to get a new one. Other fields, but those of an
earlier answer, stay in the answered row:

    {"messages": [..., {"role": "assistant", "content": "...", "reasoning_content": "..."}],
     "finish_reason": "stop" | "length", "completion_token_ids": [...]}

The ids are what the target wrote, with the end-of-turn token where it stopped by itself: the text tokenized again may
give other ids. A server gives them if it can (vLLM does); its key is read from OPENAI_API_KEY. Started again with the
same arguments, the command asks only the prompts that its output lacks; the settings stand beside the output in
OUTPUT.settings.json. Where prompts stay unanswered, they are named and the exit status is 1.
"""

import hashlib
import json
import logging
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dflash_hf.chats import (
    TOKEN_ID_KEYS,
    RowError,
    clean_messages,
    clean_tools,
    is_remote,
    nesting_limited,
    parsed,
    requested,
    template_kwargs,
    without_none,
)
from dflash_hf.cli import parse_config, refuse_unused
from dflash_hf.frozen_target import eos_token_ids, load_model
from dflash_hf.prompts import EvaluationPrompt, prompt_token_ids
from dflash_hf.serving import AnswerError, CompletionServer
from dflash_hf.tokenizing import SOURCE_KEY, read_completions
from dflash_hf.writing import only_writer, replace_file


logger = logging.getLogger(__name__)

# What belongs to an answer: of a row that once had another one, nothing of it may stay.
ANSWER_FIELDS = ("completion", "response", "reasoning_content", "finish_reason", "stop_reason", *TOKEN_ID_KEYS)


@dataclass
class CompletionArguments:
    """Which target answers which prompts, and how."""

    target: str = field(metadata={"help": "Folder or Hub id of the target, or its name on the server."})
    prompts: str = field(
        metadata={"help": 'File, folder or address of {"prompt": "..."}, {"messages": [...]} or logs.'}
    )
    output: str = field(metadata={"help": "JSON lines of answered rows; what is answered there is not asked again."})
    max_new_tokens: int = field(default=512, metadata={"help": "Longest answer, in tokens."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature; 0 takes the best token."})
    top_p: float = field(default=1.0, metadata={"help": "Share of the probability that sampling draws from."})
    batch_size: int = field(default=16, metadata={"help": "Most prompts answered together."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})
    device: str | None = field(default=None, metadata={"help": "Device of the target; by default a GPU if any."})
    dtype: str = field(default="auto", metadata={"help": "Dtype of the target; auto is the checkpoint's own."})
    enable_thinking: bool | None = field(default=None, metadata={"help": "Handed to the chat template if given."})
    server: str | None = field(default=None, metadata={"help": "Address of an OpenAI-compatible server, up to /v1."})
    concurrency: int = field(default=64, metadata={"help": "Most prompts asked of the server at once."})
    timeout: float = field(
        default=1800.0, metadata={"help": "Seconds of silence after which a prompt is asked again."}
    )
    retries: int = field(default=8, metadata={"help": "How often a prompt is asked again after a failure."})
    return_token_ids: bool = field(default=True, metadata={"help": "Ask the server for token ids (vLLM has them)."})
    drop_answers: bool = field(default=False, metadata={"help": "Leave out the answer in which a chat ends."})

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.batch_size < 1 or self.concurrency < 1:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}, batch_size {self.batch_size} and concurrency "
                f"{self.concurrency}; expected at least 1."
            )
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature is {self.temperature} and top_p is {self.top_p}; expected temperature >= 0 (0: greedy) "
                "and 0 < top_p <= 1."
            )
        if self.server is not None:
            CompletionServer(self.server)  # refuses an address that cannot be asked
            refuse_unused(self, ("batch_size", "device", "dtype"), "on a server, which is asked as it was started")
        else:
            names = ("concurrency", "timeout", "retries", "return_token_ids")
            refuse_unused(self, names, "on answers generated here, without a server")
        if self.temperature == 0:
            refuse_unused(self, ("top_p",), "at temperature 0, which takes the best token")
        self._check_output()

    def _check_output(self) -> None:
        if is_remote(self.output):
            raise ValueError(f"output is {self.output}, but is appended to as answers come: name a local file.")
        prompts, output = Path(self.prompts).resolve(), Path(self.output).resolve()
        # A pattern's `*` crosses folders here, which refuses too much rather than too little.
        if prompts in (output, output.parent) or ("*" in self.prompts and fnmatchcase(str(output), str(prompts))):
            raise ValueError(
                f"output {self.output} would be read as prompts, which are {self.prompts}: name another file, outside "
                "their folder."
            )


def read_prompts(path: str | os.PathLike, drop_answers: bool = False) -> list[dict]:
    """Read the prompts as rows with `messages` that the target is to answer, other fields kept.

    Args:
        path: As in `read_completions`: a file of JSON (compressed or not) or of Parquet, or a folder of them.
        drop_answers: Whether a chat that ends in an answer is a prompt without it.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A row that is no prompt, named by its place; no prompt at all; or a file of another kind.
    """
    return [prompt_of(row, row.pop(SOURCE_KEY), drop_answers) for row in read_completions(path)]


def prompt_of(row: dict, place: str, drop_answers: bool) -> dict:
    """The prompt of a row, as `messages`, without an earlier answer."""
    row = requested(row) if isinstance(row.get("request"), dict) else row
    # Of Parquet, a column that a row lacks is None.
    empty = [name for name in ("prompt", "messages", "tools", "chat_template_kwargs") if row.get(name) is None]
    row = {name: value for name, value in row.items() if name not in ANSWER_FIELDS and name not in empty}
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(f'{place}: expected either "prompt" or "messages"; the fields are {sorted(row)}.')
    if "prompt" in row:
        prompt = row.pop("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f'{place}: "prompt" should be a text that is not empty, but is {prompt!r}.')
        row = {"messages": [{"role": "user", "content": prompt}], **row}
    try:
        with nesting_limited():
            messages = parsed(row["messages"])
            if not isinstance(messages, list) or not all(
                isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
            ):
                raise RowError("no messages", '"messages" should be a list of objects with "role" and "content".')
            row["messages"] = unanswered([plain(message) for message in messages], drop_answers)
            if "tools" in row:
                row["tools"] = clean_tools(row["tools"]) or []
            if "chat_template_kwargs" in row:
                row["chat_template_kwargs"] = template_kwargs(row["chat_template_kwargs"])
    except RowError as error:
        raise ValueError(f"{place}: {error}") from error
    if not row["messages"] or row["messages"][-1]["role"] not in ("user", "tool"):
        raise ValueError(f'{place}: the last message should come from "user" or "tool", so that it can be answered.')
    return row


def unanswered(messages: list[dict], drop_answers: bool) -> list[dict]:
    """A chat up to the answer in which it ends."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if 0 < end < len(messages) and not drop_answers:
        raise RowError(
            "answered",
            f"the chat ends in an answer already, {messages[-1]['content'][:40]!r}. To have a new one in its place, "
            "give `--drop_answers true`; otherwise leave the row out.",
        )
    return messages[:end]


def plain(message: dict) -> dict:
    """A message without what Arrow fills in: no None, `content` always there."""
    message = without_none(message)
    return {**message, "content": message.get("content", "")}


def drop_half_written_line(output: Path) -> None:
    """Cut off what follows the last line end, which a killed run left there."""
    content = output.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        # Nothing is cut off a file that is somebody else's.
        if not b'{"'.startswith(content[complete : complete + 2]):
            raise ValueError(f"{output} is no output of this command: its last line is not of JSON. Name a new file.")
        logger.warning("%s ends in the middle of a line: dropping the last %d bytes", output, len(content) - complete)
        with output.open("r+b") as file:
            file.truncate(complete)


def answered_from(line: bytes, place: str) -> dict:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON ({error}): {line[:80]!r}. Mend or remove the line.") from error
    messages = row.get("messages") if isinstance(row, dict) else None
    is_chat = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not is_chat or messages[-1].get("role") != "assistant":
        raise ValueError(f"{place} is not an answered row. Name an output of this command, or a new file.")
    return row


def scan_answered(output: Path) -> Iterator[tuple[int, dict]]:
    """The rows that an earlier run wrote, each with where its line begins; none if there was no such run."""
    if not output.exists():
        return
    drop_half_written_line(output)
    offset = 0
    with output.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield offset, answered_from(line, f"{output}, line {number}")
            offset += len(line)


def prompt_key(row: dict, messages: list[dict]) -> bytes:
    """What makes two rows the same prompt: everything but the answer."""
    asked = {name: value for name, value in row.items() if name not in ANSWER_FIELDS and value is not None}
    asked |= {"messages": [plain(message) for message in messages], "tools": without_none(asked.get("tools"))}
    return hashlib.blake2b(json.dumps(asked, sort_keys=True, default=str).encode()).digest()


def match_keys(prompts: list[bytes], answered: list[bytes]) -> tuple[dict[int, int], list[int]]:
    """The answer's index by the prompt's, and the answers to no prompt. A prompt that stands twice needs two."""
    waiting = defaultdict(list)
    for index, key in enumerate(answered):
        waiting[key].append(index)
    matched = {index: waiting[key].pop(0) for index, key in enumerate(prompts) if waiting[key]}
    return matched, sorted(index for indices in waiting.values() for index in indices)


def settings_of(arguments: CompletionArguments) -> dict[str, Any]:
    """What the answers depend on besides the prompts."""
    names = ("target", "max_new_tokens", "temperature", "top_p", "seed", "enable_thinking")
    return {name: getattr(arguments, name) for name in names} | {"from_server": arguments.server is not None}


def check_settings(arguments: CompletionArguments) -> None:
    """Refuse to mix answers of other settings into an output."""
    path = Path(arguments.output + ".settings.json")
    if not path.exists():
        return
    now = settings_of(arguments)
    try:
        earlier = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}, which says how {arguments.output} was made, cannot be read ({error}). Remove it if these are "
            "the settings; otherwise name another output."
        ) from error
    changed = [
        f"{name}: {earlier.get(name)!r} then, {now[name]!r} now" for name in now if now[name] != earlier.get(name)
    ]
    if changed:
        raise ValueError(
            f"{arguments.output} holds answers of other settings ({'; '.join(changed)}). Give the same settings to go "
            "on, or another output."
        )


@contextmanager
def open_output(arguments: CompletionArguments) -> Iterator[TextIO]:
    """The output, to append to, which no other run does meanwhile, with its settings written beside it."""
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file, only_writer(output, "output"):
        settings = json.dumps(settings_of(arguments), indent=1) + "\n"
        replace_file(Path(arguments.output + ".settings.json"), settings)
        yield file


def to_line(row: dict) -> str:
    # Parquet has types that JSON lacks, such as times, in fields that are kept.
    return json.dumps(row, separators=(",", ":"), default=str) + "\n"


def load_target(arguments: CompletionArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load target and tokenizer, set to choose tokens by the model's own probabilities alone.

    A penalty, a top_k or a temperature in the checkpoint's generation_config does not count: verification compares a
    drafter with the target's bare distribution.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        model = load_model(arguments.target, None, {"dtype": arguments.dtype})
    except OSError as error:
        raise FileNotFoundError(
            f"target {arguments.target!r} cannot be loaded: expected a folder with a model and its tokenizer, or the "
            f"id of one on the Hub. {error}"
        ) from error
    if tokenizer.chat_template is None:
        raise ValueError(
            f"The tokenizer of {arguments.target} has no chat template, so prompts cannot be written out."
        )
    model.to(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    stop_ids = {*eos_token_ids(model.generation_config), tokenizer.eos_token_id} - {None}
    if not stop_ids:
        raise ValueError(f"{arguments.target} names no end-of-sequence token, so its answers would never stop.")
    sampling = arguments.temperature > 0
    model.generation_config = GenerationConfig(
        max_new_tokens=arguments.max_new_tokens,
        do_sample=sampling,
        **({"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": 0} if sampling else {}),
        eos_token_id=sorted(stop_ids),
        pad_token_id=min(stop_ids) if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
    return model, tokenizer


def tokenize_prompts(prompts: list[dict], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[list[int]]:
    """Write each prompt out by the chat template, up to where the answer begins; none may exceed `max_length`."""
    chats = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            # As training data is written out, whose tool calls and parts of text templates would take otherwise.
            messages = clean_messages(prompt["messages"])
        except RowError as error:
            raise ValueError(f"Prompt {number}: {error}") from error
        options = prompt.get("chat_template_kwargs", {})
        chats.append(EvaluationPrompt(messages, tools=prompt.get("tools"), template_kwargs=options))
    tokenized = prompt_token_ids(chats, tokenizer)
    for number, input_ids in enumerate(tokenized, start=1):
        if len(input_ids) > max_length:
            raise ValueError(
                f"Prompt {number} has {len(input_ids)} tokens, but the target's positions leave room for "
                f"{max_length} beside max_new_tokens. Shorten the prompt or lower max_new_tokens."
            )
    return tokenized


def batches_by_length(indices: list[int], lengths: list[int], batch_size: int) -> list[list[int]]:
    """Cut `indices` into batches of similar length, the longest first, so that too large a batch fails at once."""
    ordered = sorted(indices, key=lambda index: -lengths[index])
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def generate(model: PreTrainedModel, batch: list[list[int]], seed: int) -> list[list[int]]:
    """Answer a left-padded batch; each answer ends with its end-of-sequence token, if it came to one.

    In fp32 the padding does not show: of SmolLM2's greedy answers in recipes/smollm2-135m, 20 of 20 came out the same
    alone, padded together, and in batches of equal length.
    """
    torch.manual_seed(seed)
    longest = max(len(prompt) for prompt in batch)
    pad = model.generation_config.pad_token_id
    input_ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in batch], device=model.device)
    # From the lengths and not from the ids, since the padding token may be one that prompts hold.
    starts = torch.tensor([[longest - len(prompt)] for prompt in batch], device=model.device)
    attention_mask = (torch.arange(longest, device=model.device) >= starts).long()
    generated = model.generate(input_ids, attention_mask=attention_mask)[:, longest:]
    stop_ids = model.generation_config.eos_token_id
    answers = []
    for answer in generated.tolist():
        ends = [position for position, token in enumerate(answer) if token in stop_ids]
        answers.append(answer[: ends[0] + 1] if ends else answer)
    return answers


def answered_row(prompt: dict, answer: list[int], tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]) -> dict:
    """Join a prompt and its answer into a row."""
    stopped = answer[-1] in stop_ids
    content = tokenizer.decode(answer[:-1] if stopped else answer, skip_special_tokens=True)
    return prompt | {
        "messages": [*prompt["messages"], {"role": "assistant", "content": content}],
        "finish_reason": "stop" if stopped else "length",
        "completion_token_ids": answer,
    }


def complete(prompts: list[dict], indices: list[int], arguments: CompletionArguments) -> Counter:
    """Answer `prompts[i]` for i in `indices`, append the rows to the output batch by batch, count how they ended."""
    model, tokenizer = load_target(arguments)
    longest = model.config.get_text_config().max_position_embeddings - arguments.max_new_tokens
    tokenized = tokenize_prompts(prompts, tokenizer, longest)
    batches = batches_by_length(indices, [len(ids) for ids in tokenized], arguments.batch_size)
    counts: Counter = Counter()
    with open_output(arguments) as file, tqdm(total=len(indices), unit="prompt") as progress:
        for batch in batches:
            # A seed of the batch's own, so that a run started again does not draw what the first one drew.
            answers = generate(model, [tokenized[index] for index in batch], arguments.seed * len(prompts) + batch[0])
            for index, answer in zip(batch, answers, strict=True):
                row = answered_row(prompts[index], answer, tokenizer, model.generation_config.eos_token_id)
                file.write(to_line(row))
                counts.update({"rows": 1, "tokens": len(answer), row["finish_reason"]: 1})
            file.flush()
            progress.update(len(batch))
            progress.set_postfix_str(f"{counts['tokens'] / progress.format_dict['elapsed']:.0f} tokens/s")
    return counts


def server_request(prompt: dict, arguments: CompletionArguments, seed: int) -> dict[str, Any]:
    """The body of a chat completion request."""
    body = {
        "model": arguments.target,
        "messages": prompt["messages"],
        "max_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "seed": seed,
    }
    body |= {name: prompt[name] for name in ("tools", "chat_template_kwargs") if prompt.get(name)}
    if arguments.return_token_ids:
        body["return_token_ids"] = True
    return body


def served_row(prompt: dict, choice: dict[str, Any]) -> dict:
    """Join a prompt and what a server answered into a row."""
    message = choice["message"]
    answer = {"role": "assistant", "content": message.get("content") or ""}
    thinking = message.get("reasoning_content") or message.get("reasoning")
    answer |= {"reasoning_content": thinking} if thinking else {}
    answer |= {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    row = prompt | {"messages": [*prompt["messages"], answer], "finish_reason": choice.get("finish_reason")}
    # Of a stop sequence the text, which is then no end of turn; of a token the id, which is the last of the ids.
    row |= {"stop_reason": choice["stop_reason"]} if isinstance(choice.get("stop_reason"), str) else {}
    ids = choice.get("token_ids")
    return row | ({"completion_token_ids": ids} if ids else {})


def num_tokens(row: dict, choice: dict[str, Any]) -> int:
    """Tokens of an answer by its ids, or else by what the server says."""
    said = (choice.get("usage") or {}).get("completion_tokens") or 0
    return len(row.get("completion_token_ids", ())) or said


def ask_server(prompts: list[dict], indices: list[int], arguments: CompletionArguments) -> Counter:
    """Ask a server for `prompts[i]`, append each row to the output as it comes, count how they ended."""
    server = CompletionServer(arguments.server, arguments.timeout, arguments.retries)
    requests = ((i, server_request(prompts[i], arguments, arguments.seed * len(prompts) + i)) for i in indices)
    counts: Counter = Counter()
    with open_output(arguments) as file, tqdm(total=len(indices), unit="prompt") as progress:
        for index, choice in server.answer_all(requests, arguments.concurrency):
            progress.update()
            if isinstance(choice, AnswerError):
                counts["unanswered"] += 1
                progress.write(f"prompt {index + 1} stays unanswered: {choice}", file=sys.stderr)
                continue
            row = served_row(prompts[index], choice)
            file.write(to_line(row))
            file.flush()
            counts.update({"rows": 1, "tokens": num_tokens(row, choice), str(row["finish_reason"]): 1})
            progress.set_postfix_str(f"{counts['tokens'] / progress.format_dict['elapsed']:.0f} tokens/s")
    return counts


def write_in_order(output: Path, keys: list[bytes]) -> None:
    """Put the rows in the order of the prompts; one rename does it, and a kill before it loses none."""
    offsets, answered = [], []
    for offset, row in scan_answered(output):
        offsets.append(offset)
        answered.append(prompt_key(row, row["messages"][:-1]))
    matched, others = match_keys(keys, answered)
    ordered = output.with_name(output.name + ".ordered")
    with output.open("rb") as source, ordered.open("wb") as target:
        for index in [*(matched[i] for i in range(len(keys)) if i in matched), *others]:
            source.seek(offsets[index])
            target.write(source.readline())
    ordered.replace(output)


def main(arguments: CompletionArguments) -> int:
    """Answer what the output lacks, leave it in the order of the prompts, and return the exit status."""
    output = Path(arguments.output)
    prompts = read_prompts(arguments.prompts, arguments.drop_answers)
    if arguments.enable_thinking is not None:
        options = {"enable_thinking": arguments.enable_thinking}
        prompts = [
            {**prompt, "chat_template_kwargs": options | prompt.get("chat_template_kwargs", {})} for prompt in prompts
        ]
    check_settings(arguments)
    keys = [prompt_key(prompt, prompt["messages"]) for prompt in prompts]
    answered = [prompt_key(row, row["messages"][:-1]) for _, row in scan_answered(output)]
    matched, others = match_keys(keys, answered)
    if others:
        logger.warning("%d rows of %s answer none of the prompts; they stay, at its end", len(others), output)
    print(f"{len(prompts)} prompts, {len(matched)} of them already answered in {output}")
    indices = [index for index in range(len(prompts)) if index not in matched]
    counts: Counter = Counter()
    if indices:
        counts = (complete if arguments.server is None else ask_server)(prompts, indices, arguments)
        print(
            f"{counts['rows']} answers of {counts['tokens']} tokens: {counts['stop']} stopped by themselves, "
            f"{counts['length']} reached {arguments.max_new_tokens} tokens, {counts['unanswered']} prompts failed"
        )
    if output.exists():
        write_in_order(output, keys)
    return 1 if counts["unanswered"] else 0


def end(text: str) -> NoReturn:
    """End the process with status 1, and with it threads that still wait for a server: that may take half an hour."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    logging.basicConfig()
    try:
        sys.exit(main(parse_config(CompletionArguments, description=__doc__.split("\n")[0])[0]))
    except (ValueError, OSError, AnswerError) as error:
        end(f"error: {error}")
    except KeyboardInterrupt:
        end("interrupted: what is answered stays, and the same command goes on")
