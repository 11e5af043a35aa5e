# SPDX-License-Identifier: Apache-2.0
"""Let the target answer prompts itself: a drafter learns from text that its own target wrote.

    python recipes/generate_completions.py --target FOLDER_OR_ID --prompts prompts.jsonl --output completions.jsonl

A prompt is a line `{"prompt": "..."}` or `{"messages": [...]}`; its other fields stay in the answered row:

    {"messages": [..., {"role": "assistant", "content": "..."}], "finish_reason": "stop" | "length",
     "completion_token_ids": [...]}

The ids are what the target wrote, with the end-of-turn token where it stopped by itself: the text tokenized again may
give other ids. Started again with the same arguments, the command asks only the prompts that its output lacks.
"""

import json
import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


logger = logging.getLogger(__name__)


@dataclass
class CompletionArguments:
    """Which target answers which prompts, and how."""

    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    prompts: str = field(metadata={"help": 'JSON lines of {"prompt": "..."} or {"messages": [...]}.'})
    output: str = field(metadata={"help": "JSON lines of answered rows; what is answered there is not asked again."})
    max_new_tokens: int = field(default=512, metadata={"help": "Longest answer, in tokens."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature; 0 takes the best token."})
    top_p: float = field(default=1.0, metadata={"help": "Share of the probability that sampling draws from."})
    batch_size: int = field(default=16, metadata={"help": "Most prompts answered together."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})
    device: str | None = field(default=None, metadata={"help": "Device of the target; by default a GPU if any."})
    dtype: str = field(default="auto", metadata={"help": "Dtype of the target; auto is the checkpoint's own."})
    enable_thinking: bool | None = field(default=None, metadata={"help": "Handed to the chat template if given."})

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.batch_size < 1:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens} and batch_size is {self.batch_size}; expected at least 1."
            )
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature is {self.temperature} and top_p is {self.top_p}; expected temperature >= 0 (0: greedy) "
                "and 0 < top_p <= 1."
            )
        if Path(self.output).resolve() == Path(self.prompts).resolve():
            raise ValueError(f"output is the prompts' own file, {self.prompts}; name another one.")


def read_json_lines(path: Path) -> list[tuple[str, dict]]:
    """Read one object per line, each with its place (file and line) for messages; a broken line is a ValueError."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; expected JSON lines.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is not JSON ({error}): {line[:80]!r}. Mend or remove the line.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place} is a {type(row).__name__}, but should be an object: {line[:80]!r}.")
        rows.append((place, row))
    return rows


def read_prompts(path: Path) -> list[dict]:
    """Read the prompts as rows with `messages` that the target is to answer, other fields kept."""
    prompts = []
    for place, row in read_json_lines(path):
        if ("prompt" in row) == ("messages" in row):
            raise ValueError(f'{place} should have either "prompt" or "messages"; its fields are {sorted(row)}.')
        if "prompt" in row:
            prompt = row.pop("prompt")
            if not isinstance(prompt, str) or not prompt.strip():
                raise ValueError(f'{place}: "prompt" should be a text that is not empty, but is {prompt!r}.')
            row = {"messages": [{"role": "user", "content": prompt}], **row}
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ValueError(f'{place}: "messages" should be a list of objects with "role" and "content".')
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise ValueError(
                f'{place}: the last message should come from "user" or "tool", so that it can be answered.'
            )
        prompts.append(row)
    if not prompts:
        raise ValueError(f"{path} holds no prompts; expected one JSON object per line.")
    return prompts


def drop_half_written_line(output: Path) -> None:
    """Cut off what follows the last line end, which a killed run left there."""
    content = output.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        logger.warning("%s ends in the middle of a line: dropping the last %d bytes", output, len(content) - complete)
        with output.open("r+b") as file:
            file.truncate(complete)


def read_answered(output: Path) -> list[dict]:
    """Read the rows that an earlier run wrote; none if there was no such run."""
    if not output.exists():
        return []
    drop_half_written_line(output)
    answered = []
    for place, row in read_json_lines(output):
        messages = row.get("messages")
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError(f"{place} is not an answered row. Name an output of this command, or a new file.")
        answered.append(row)
    return answered


def prompt_key(row: dict, messages: list[dict]) -> str:
    """What makes two rows the same prompt: everything but the answer."""
    asked = {name: row[name] for name in row if name not in ("finish_reason", "completion_token_ids")}
    return json.dumps(asked | {"messages": messages}, sort_keys=True)


def match_answers(prompts: list[dict], answered: list[dict]) -> tuple[dict[int, dict], list[dict]]:
    """Rows by the index of the prompt they answer, and the rows of other prompts.

    A prompt that stands twice needs two rows.
    """
    waiting = defaultdict(list)
    for row in answered:
        waiting[prompt_key(row, row["messages"][:-1])].append(row)
    matched = {}
    for index, prompt in enumerate(prompts):
        rows = waiting[prompt_key(prompt, prompt["messages"])]
        if rows:
            matched[index] = rows.pop(0)
    return matched, [row for rows in waiting.values() for row in rows]


def to_line(row: dict) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


def load_target(arguments: CompletionArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load target and tokenizer, set to choose tokens by the model's own probabilities alone.

    A penalty, a top_k or a temperature in the checkpoint's generation_config does not count: verification compares a
    drafter with the target's bare distribution.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=arguments.dtype)
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
    named = model.generation_config.eos_token_id
    stop_ids = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id} - {None}
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


def tokenize_prompts(
    prompts: list[dict], tokenizer: PreTrainedTokenizerBase, max_length: int, enable_thinking: bool | None
) -> list[list[int]]:
    """Write each prompt out by the chat template, up to where the answer begins; none may exceed `max_length`."""
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    tokenized = []
    for prompt in prompts:
        encoding = tokenizer.apply_chat_template(
            prompt["messages"], tools=prompt.get("tools"), add_generation_prompt=True, return_dict=True, **options
        )
        input_ids = encoding["input_ids"]
        if len(input_ids) > max_length:
            raise ValueError(
                f"Prompt {len(tokenized) + 1} has {len(input_ids)} tokens, but the target's positions leave room for "
                f"{max_length} beside max_new_tokens. Shorten the prompt or lower max_new_tokens."
            )
        tokenized.append(input_ids)
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
    tokenized = tokenize_prompts(prompts, tokenizer, longest, arguments.enable_thinking)
    batches = batches_by_length(indices, [len(ids) for ids in tokenized], arguments.batch_size)
    counts: Counter = Counter()
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file, tqdm(total=len(indices), unit="prompt") as progress:
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


def main(arguments: CompletionArguments) -> None:
    """Answer what the output lacks, and leave it in the order of the prompts."""
    output = Path(arguments.output)
    prompts = read_prompts(Path(arguments.prompts))
    matched, others = match_answers(prompts, read_answered(output))
    if others:
        logger.warning("%d rows of %s answer none of the prompts; they stay, at its end", len(others), output)
    print(f"{len(prompts)} prompts, {len(matched)} of them already answered in {output}")
    indices = [index for index in range(len(prompts)) if index not in matched]
    if indices:
        counts = complete(prompts, indices, arguments)
        print(
            f"{counts['rows']} answers of {counts['tokens']} tokens: {counts['stop']} stopped by themselves, "
            f"{counts['length']} reached {arguments.max_new_tokens} tokens"
        )
        matched, others = match_answers(prompts, read_answered(output))
    # The batches wrote the rows by length; one rename puts them in order, and a kill before it loses none.
    ordered = output.with_name(output.name + ".ordered")
    ordered.write_text("".join(to_line(row) for row in [*(matched[i] for i in range(len(prompts))), *others]))
    ordered.replace(output)


if __name__ == "__main__":
    logging.basicConfig()
    main(HfArgumentParser(CompletionArguments).parse_args_into_dataclasses()[0])
