# SPDX-License-Identifier: Apache-2.0
"""Let the target answer prompts itself: a drafter learns from text that its own target wrote.

    dflash-hf generate --target FOLDER_OR_ID --prompts prompts.jsonl --output completions.jsonl
    dflash-hf generate --server http://127.0.0.1:8000/v1 --target NAME_ON_THE_SERVER ...

[`read_prompts`] says what a prompt is. Of a server's log the request is asked again, with its tools and
chat_template_kwargs, by the model and the sampling given here. A chat that ends in an answer is skipped unless
`--drop_answers true` says that it is to get a new one. Other fields of a row stay in the answered row:

    {"messages": [..., {"role": "assistant", "content": "...", "reasoning_content": "..."}],
     "finish_reason": "stop" | "length", "completion_token_ids": [...]}

The ids are what the target wrote, with the end-of-turn token where it stopped by itself: the text tokenized again may
give other ids. A server gives them if it can (vLLM does); its key is read from OPENAI_API_KEY. Earlier answers of a
chat, which others wrote, are marked `"train": false`. The same command again asks only what its output lacks; the
settings stand in OUTPUT.settings.json. Prompts that stay unanswered are named, and the exit status is 1.
"""

import hashlib
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .chats import RowError, is_remote
from .cli import parse_config, refuse_unused
from .frozen_target import eos_token_ids, load_model
from .prompts import EvaluationPrompt, as_prompt, prompt_token_ids, read_prompts
from .serving import AnswerError, CompletionServer, request_body
from .writing import only_writer, publish_file, replace_file


logger = logging.get_logger(__name__)


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
        for name in ("max_new_tokens", "batch_size", "concurrency"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name} is {vars(self)[name]}; expected at least 1.")
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
        if is_remote(self.output):
            raise ValueError(f"output is {self.output}, but is appended to as answers come: name a local file.")
        prompts, output = Path(self.prompts).resolve(), Path(self.output).resolve()
        # A pattern's `*` crosses folders here, which refuses too much rather than too little.
        if prompts in (output, output.parent) or ("*" in self.prompts and fnmatchcase(str(output), str(prompts))):
            raise ValueError(f"output {self.output} would be read as prompts, {self.prompts}: name a file elsewhere.")


def main(argv: Sequence[str] | None = None) -> int:
    """`dflash-hf generate`; returns the exit status."""
    try:
        description = (__doc__ or "").split("\n")[0]
        (arguments,) = parse_config(CompletionArguments, argv, description=description, prog="dflash-hf generate")
        return answer_prompts(arguments)
    except (ValueError, OSError, AnswerError) as error:
        _end(f"dflash-hf generate: error: {error}")
    except KeyboardInterrupt:
        _end("interrupted: what is answered stays, and the same command goes on")


def _end(text: str) -> NoReturn:
    """End the process, and with it threads that still wait for a server: that may take half an hour."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


def answer_prompts(arguments: CompletionArguments) -> int:
    """Answer what the output lacks, leave it in the order of the prompts, and return the exit status."""
    output = Path(arguments.output)
    skipped: list[str] = []
    prompts = read_prompts(arguments.prompts, arguments.drop_answers, skipped)
    for message in skipped:
        print(f"skipped {message}", file=sys.stderr)
    if arguments.enable_thinking is not None:
        options = {"enable_thinking": arguments.enable_thinking}
        prompts = [replace(prompt, template_kwargs=options | prompt.template_kwargs) for prompt in prompts]
    check_settings(arguments)
    keys = [prompt_key(prompt) for prompt in prompts]
    matched, others = match_keys(keys, [key for _, key in scan_answered(output)])
    if others:
        logger.warning(f"{len(others)} rows of {output} answer none of the prompts; they stay, at its end.")
    print(f"{len(prompts)} prompts, {len(matched)} of them already answered in {output}")
    indices = [index for index in range(len(prompts)) if index not in matched]
    counts: Counter = Counter()
    if indices:
        counts = (generate_here if arguments.server is None else ask_server)(prompts, indices, arguments)
        print(
            f"{counts['rows']} answers of {counts['tokens']} tokens: {counts['stop']} stopped by themselves, "
            f"{counts['length']} reached {arguments.max_new_tokens} tokens, {counts['unanswered']} prompts failed"
        )
    if output.exists():
        write_in_order(output, keys)
    return 1 if counts["unanswered"] or skipped else 0


# --- The output: what it holds already, and by which settings.


def prompt_key(prompt: EvaluationPrompt) -> bytes:
    """What makes two rows the same prompt: everything but the answer."""
    messages = [{name: value for name, value in message.items() if name != "train"} for message in prompt.messages]
    fields = {name: value for name, value in prompt.fields.items() if value is not None}
    asked = [messages, prompt.tools, prompt.template_kwargs, fields]
    return hashlib.blake2b(json.dumps(asked, sort_keys=True, default=str).encode()).digest()


def match_keys(prompts: list[bytes], answered: list[bytes]) -> tuple[dict[int, int], list[int]]:
    """The answer's index by the prompt's, and the answers to no prompt. A prompt that stands twice needs two."""
    waiting = defaultdict(list)
    for index, key in enumerate(answered):
        waiting[key].append(index)
    matched = {index: waiting[key].pop(0) for index, key in enumerate(prompts) if waiting[key]}
    return matched, sorted(index for indices in waiting.values() for index in indices)


def scan_answered(output: Path) -> Iterator[tuple[int, bytes]]:
    """Where each row begins that an earlier run wrote, with its prompt's key; none if there was no such run."""
    if not output.exists():
        return
    _drop_half_written_line(output)
    offset = 0
    with output.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield offset, _answered_key(line, f"{output}:{number}")
            offset += len(line)


def _drop_half_written_line(output: Path) -> None:
    """Cut off what follows the last line end, which a killed run left there."""
    content = output.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        # Nothing is cut off a file that is somebody else's.
        if not b'{"'.startswith(content[complete : complete + 2]):
            raise ValueError(f"{output} is not an output of this command, by its last line. Name a new file.")
        logger.warning(f"{output} ends in the middle of a line: dropping the last {len(content) - complete} bytes.")
        with output.open("r+b") as file:
            file.truncate(complete)


def _answered_key(line: bytes, place: str) -> bytes:
    try:
        row = json.loads(line)
        if row["messages"][-1]["role"] != "assistant":
            raise ValueError("it does not end in an answer")
        return prompt_key(as_prompt(row, place))
    except (ValueError, TypeError, LookupError, RowError) as error:
        raise ValueError(f"{place} is not an answered row ({error!r}). Mend the line, or name a new file.") from error


def check_settings(arguments: CompletionArguments) -> None:
    """Refuse to mix answers of other settings into an output."""
    path = Path(arguments.output + ".settings.json")
    if not path.exists():
        return
    now = _settings(arguments)
    try:
        earlier = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Remove it, or name another output.") from error
    other = {name: (earlier.get(name), value) for name, value in now.items() if value != earlier.get(name)}
    changed = [f"{name}: {before!r} then, {value!r} now" for name, (before, value) in other.items()]
    if changed:
        raise ValueError(
            f"{arguments.output} holds answers of other settings ({'; '.join(changed)}). Give the same settings to go "
            "on, or another output."
        )


def _settings(arguments: CompletionArguments) -> dict[str, Any]:
    """What the answers depend on besides the prompts."""
    names = ("target", "max_new_tokens", "temperature", "top_p", "seed", "enable_thinking")
    return {name: vars(arguments)[name] for name in names} | {"from_server": arguments.server is not None}


@contextmanager
def open_output(arguments: CompletionArguments) -> Iterator[TextIO]:
    """The output, to append to, which no other run does meanwhile, with its settings written beside it."""
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file, only_writer(output, "output"):
        replace_file(Path(arguments.output + ".settings.json"), json.dumps(_settings(arguments), indent=1) + "\n")
        yield file


def write_in_order(output: Path, keys: list[bytes]) -> None:
    """Put the rows in the order of the prompts; one rename does it, and a kill before it loses none."""
    answered = list(scan_answered(output))
    matched, others = match_keys(keys, [key for _, key in answered])
    ordered = output.with_name(output.name + ".ordered")
    with output.open("rb") as source, ordered.open("wb") as target:
        for index in [*(matched[i] for i in range(len(keys)) if i in matched), *others]:
            source.seek(answered[index][0])
            target.write(source.readline())
    publish_file(ordered, output)


def answered_row(prompt: EvaluationPrompt, answer: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The row of a prompt and its answer. Only this answer is the target's: those before it are not to be learned."""
    messages = [{**m, "train": False} if m["role"] == "assistant" else m for m in prompt.messages]
    row = {**prompt.fields, "messages": [*messages, {"role": "assistant", **answer}]}
    row |= {"tools": prompt.tools} if prompt.tools else {}
    row |= {"chat_template_kwargs": prompt.template_kwargs} if prompt.template_kwargs else {}
    return row | {name: value for name, value in fields.items() if value is not None}


class _Answers:
    """Writes answered rows as they come, and counts how they ended."""

    def __init__(self, file: TextIO, total: int):
        self.file, self.counts, self.bar = file, Counter[str](), tqdm(total=total, unit="prompt")

    def write(self, row: dict[str, Any], num_tokens: int) -> None:
        # Parquet has types that JSON lacks, such as times, in fields that are kept.
        self.file.write(json.dumps(row, separators=(",", ":"), default=str) + "\n")
        self.file.flush()
        self.counts.update({"rows": 1, "tokens": num_tokens, str(row.get("finish_reason")): 1})
        self.bar.update()
        self.bar.set_postfix_str(f"{self.counts['tokens'] / self.bar.format_dict['elapsed']:.0f} tokens/s")

    def leave_out(self, prompt: EvaluationPrompt, error: Exception) -> None:
        self.counts["unanswered"] += 1
        self.bar.write(f"{prompt.place} stays unanswered: {error}", file=sys.stderr)
        self.bar.update()


# --- Answers of a server.


def ask_server(prompts: list[EvaluationPrompt], indices: list[int], arguments: CompletionArguments) -> Counter:
    """Ask a server for `prompts[i]`, append each row to the output as it comes, count how they ended."""
    server = CompletionServer(str(arguments.server), arguments.timeout, arguments.retries)
    settings: dict[str, Any] = {"model": arguments.target, "max_tokens": arguments.max_new_tokens}
    settings |= {"temperature": arguments.temperature, "top_p": arguments.top_p}
    settings |= {"return_token_ids": True} if arguments.return_token_ids else {}
    first_seed = arguments.seed * len(prompts)
    requests = ((i, request_body(prompts[i], {**settings, "seed": first_seed + i})) for i in indices)
    with open_output(arguments) as file:
        answers = _Answers(file, len(indices))
        for index, choice in server.answer_all(requests, arguments.concurrency):
            if isinstance(choice, AnswerError):
                answers.leave_out(prompts[index], choice)
            else:
                row = _served_row(prompts[index], choice)
                said = (choice.get("usage") or {}).get("completion_tokens") or 0
                answers.write(row, len(row.get("completion_token_ids", ())) or said)
    answers.bar.close()
    return answers.counts


def _served_row(prompt: EvaluationPrompt, choice: dict[str, Any]) -> dict[str, Any]:
    message, stop = choice["message"], choice.get("stop_reason")
    answer = {"content": message.get("content") or ""}
    thinking = message.get("reasoning_content") or message.get("reasoning")
    answer |= {"reasoning_content": thinking} if thinking else {}
    answer |= {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    return answered_row(
        prompt,
        answer,
        finish_reason=choice.get("finish_reason"),
        # Of a stop sequence the text, which is not an end of turn; of a token the id, which is the last of the ids.
        stop_reason=stop if isinstance(stop, str) else None,
        completion_token_ids=choice.get("token_ids") or None,
    )


# --- Answers of a target that is loaded here.


def generate_here(prompts: list[EvaluationPrompt], indices: list[int], arguments: CompletionArguments) -> Counter:
    """Answer `prompts[i]`, append the rows to the output batch by batch, count how they ended."""
    model, tokenizer = load_target(arguments)
    known = model.config.get_text_config().to_dict().get("max_position_embeddings")
    longest = None if known is None else known - arguments.max_new_tokens
    with open_output(arguments) as file:
        answers, tokenized = _Answers(file, len(indices)), {}
        for index in indices:
            try:
                tokenized[index] = tokenize_prompt(prompts[index], tokenizer, longest)
            except ValueError as error:
                answers.leave_out(prompts[index], error)
        for batch in batches_by_length(tokenized, arguments.batch_size):
            # A seed of the batch's own, so that a run started again does not draw what the first one drew.
            seed = arguments.seed * len(prompts) + batch[0]
            for index, ids in zip(batch, generate(model, [tokenized[i] for i in batch], seed), strict=True):
                answers.write(_generated_row(prompts[index], ids, model, tokenizer), len(ids))
    answers.bar.close()
    return answers.counts


def load_target(arguments: CompletionArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load target and tokenizer, set to choose tokens by the model's own probabilities alone.

    A penalty, a top_k or a temperature in the checkpoint's generation_config does not count: verification compares a
    drafter with the target's bare distribution.
    """
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    if tokenizer.chat_template is None:
        raise ValueError(f"The tokenizer of {arguments.target} has no chat template to write prompts out by.")
    model: Any = load_model(arguments.target, None, {"dtype": arguments.dtype})
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


def tokenize_prompt(prompt: EvaluationPrompt, tokenizer: PreTrainedTokenizerBase, longest: int | None) -> list[int]:
    """A prompt's token ids up to where the answer begins; a ValueError where the template fails or it is too long."""
    (input_ids,) = prompt_token_ids([prompt], tokenizer)
    if longest is not None and len(input_ids) > longest:
        raise ValueError(
            f"it has {len(input_ids)} tokens, and the target's positions leave room for {longest} beside "
            "max_new_tokens. Shorten it or lower max_new_tokens."
        )
    return input_ids


def batches_by_length(tokenized: dict[int, list[int]], batch_size: int) -> list[list[int]]:
    """Indices in batches of similar length, the longest first, so that too large a batch fails at once."""
    ordered = sorted(tokenized, key=lambda index: -len(tokenized[index]))
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def generate(model: PreTrainedModel, batch: list[list[int]], seed: int) -> list[list[int]]:
    """Answer a left-padded batch; each answer ends with its end-of-sequence token, if it came to one.

    In fp32 the padding does not show: of SmolLM2's greedy answers in recipes/smollm2-135m, 20 of 20 came out the same
    alone, padded together, and in batches of equal length.
    """
    torch.manual_seed(seed)
    config: Any = model.generation_config
    longest = max(len(prompt) for prompt in batch)
    rows = [[config.pad_token_id] * (longest - len(prompt)) + prompt for prompt in batch]
    input_ids = torch.tensor(rows, device=model.device)
    # From the lengths and not from the ids, since the padding token may be one that prompts hold.
    starts = torch.tensor([[longest - len(prompt)] for prompt in batch], device=model.device)
    attention_mask = (torch.arange(longest, device=model.device) >= starts).long()
    generated = model.generate(input_ids, attention_mask=attention_mask)[:, longest:]  # type: ignore[operator]
    answers = []
    for answer in generated.tolist():
        ends = [position for position, token in enumerate(answer) if token in config.eos_token_id]
        answers.append(answer[: ends[0] + 1] if ends else answer)
    return answers


def _generated_row(
    prompt: EvaluationPrompt, ids: list[int], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    config: Any = model.generation_config
    stopped = ids[-1] in config.eos_token_id
    content = tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=True)
    reason = "stop" if stopped else "length"
    return answered_row(prompt, {"content": content}, finish_reason=reason, completion_token_ids=ids)
