# SPDX-License-Identifier: Apache-2.0
"""What the package computes, written down: one JSON file beside this one for each function of `RECORDS`.

    PYTHONPATH=. OMP_NUM_THREADS=1 .venv/bin/python tests/contract/record.py collator decoding   # these two
    PYTHONPATH=. OMP_NUM_THREADS=1 .venv/bin/python tests/contract/record.py                     # all

in the repository's root is the only way in which a record changes, and prints what changed in it; a changed record has
a commit of its own that says why. `test_contract.py` computes each record anew and compares: integers, names and texts
exactly, floats to `TOLERANCE` of themselves. Versions, times, paths and hashes of weights are masked.

The package is reached through what stays: `dflash_hf.__all__`, `dflash_hf.generation`, the command `dflash-hf`,
`dflash-hf publish` by its command line, and the Trainer's own methods. Examples of broken checkpoints and
configurations as on the Hub are those of the other tests.

Not recorded: the bytes of files and weights. That a run killed and resumed ends in those of a run left alone is held
by two runs of the same code, in `test_resuming.py` and in `test_tokenizing.py`. Floats survive another
order of sums (checked with `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`, with `default` for both, and with
weights changed by 1e-6 of themselves). Another release of torch may draw other random numbers; that is no change of
the package, and a reason to record anew.
"""

import contextlib
import copy
import io
import itertools
import json
import logging
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from safetensors import safe_open
from transformers import PrinterCallback


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from examples import CONFIG, EXAMPLES, GOOD, UNREADABLE, unreadable, write, zlab_tensors  # noqa: E402 (in tests/)
from published import PUBLISHED, small, write_folder  # noqa: E402
from tiny import MASK_TOKEN_ID, byte_tokenizer, dense_target, hybrid_target, llama_target  # noqa: E402

from dflash_hf import (  # noqa: E402
    DataCollatorForDFlash,
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    PackedDataset,
    TokenizeOptions,
    load_documents,
    publishing,
    read_completions,
    tokenize_completions,
    tokenize_files,
    validate_checkpoint,
)
from dflash_hf.generation import speculative_decoding, speculative_generate  # noqa: E402


TOLERANCE = 1e-4
MASKED = "(masked)"
# Fields whose values depend on the machine, the day or an installed version.
MASKED_FIELDS = {
    *("version", "versions", "transformers_version", "git_commit", "hours", "hardware"),
    *("digest", "manifest_hash"),
}
FULL, SLIDING = "full_attention", "sliding_attention"


def numbers(count: int, seed: int, low: int, high: int) -> list[int]:
    """Integers of `range(low, high)` from a stream that NumPy promises to keep."""
    return (np.random.PCG64(seed).random_raw(count) % np.uint64(high - low) + np.uint64(low)).astype(int).tolist()


def plain(value: Any) -> Any:
    """Tensors and arrays as lists."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) else value


# The collator


def twenty_documents() -> list[dict[str, Any]]:
    """Documents of 4 to 40 tokens: whole, cut, touching, gappy and single supervised spans, and one without any."""
    documents = []
    for index, length in enumerate(numbers(20, 1, 12, 41)):
        first = 2 + index % 5
        spans = [
            [[first, length]],
            [[first, first + 3], [first + 5, length]],
            [[first, first + 2], [first + 2, length - 1]],
            [[0, 4], [6, 7], [9, length]],
            [[first, length - 2]],
        ][index % 5]
        documents.append({"input_ids": numbers(length, 100 + index, 0, 256), "supervised_spans": spans})
    documents[7]["supervised_spans"] = []
    documents[11] = {"input_ids": [1, 2, 3, 4], "supervised_spans": [[3, 4]]}
    documents[12]["input_ids"] = documents[12]["input_ids"][:12]
    documents[12]["supervised_spans"] = [[2, 10]]
    documents[16] = copy.deepcopy(documents[2])
    return documents


def collator(folder: Path) -> dict[str, Any]:
    """Batches of 20 documents."""
    documents = twenty_documents()
    rows = PackedDataset(documents, row_length=64, seed=3)
    collators = {
        "default": DataCollatorForDFlash(block_size=4, num_anchors=8, seed=5),
        "capped and padded": DataCollatorForDFlash(
            block_size=8, max_anchors_per_row=9, row_length=64, pad_token_id=7, pad_anchors_to_multiple_of=8
        ),
        "of the first epoch in all": DataCollatorForDFlash(block_size=6, num_anchors=3, seed=5, redraw=False),
    }
    as_dataset = PackedDataset(datasets.Dataset.from_list(documents), row_length=64, seed=3)
    half = len(rows) // 2
    return {
        "rows": {
            f"epoch {epoch}": [
                [document["document"] for document in rows[epoch, row]["documents"]] for row in range(len(rows))
            ]
            for epoch in range(3)
        },
        "a data set gives the same rows": all(as_dataset[1, k] == rows[1, k] for k in range(len(rows))),
        "batches": {
            f"{name}, epoch {epoch}, rows {start} to {stop - 1}": plain(
                collate([rows[epoch, row] for row in range(start, stop)])
            )
            for name, collate in collators.items()
            for epoch, start, stop in ((0, 0, half), (1, half, len(rows)))
        },
    }


# Training


def make_drafter(target: Any, **fields: Any) -> DFlashDraftModel:
    """A random drafter: a causal layer with a window, and a bidirectional one."""
    values = {"num_hidden_layers": 2, "num_taps": 2, "mask_token_id": MASK_TOKEN_ID, "block_size": 4}
    values |= {"layer_types": [SLIDING, FULL], "sliding_window": 9, "use_sliding_window": True}
    torch.manual_seed(0)
    return DFlashDraftModel(DFlashDraftConfig.from_target_config(target.config, **{**values, **fields}))


def easy_documents() -> list[dict[str, Any]]:
    """Documents whose answers say one thing again and again, so that some guesses are right soon."""
    return [
        {**document, "input_ids": [document["input_ids"][0], *([65, 66, 67] * 14)[: len(document["input_ids"]) - 1]]}
        for document in twenty_documents()
    ]


def make_trainer(
    folder: Path, target: Any, drafter: Any = None, documents: list | None = None, **arguments: Any
) -> DFlashTrainer:
    values: dict[str, Any] = {"output_dir": str(folder), "row_length": 64, "num_anchors": 8, "max_steps": 20}
    values |= {"per_device_train_batch_size": 2, "learning_rate": 2e-4, "logging_steps": 1, "seed": 11}
    values |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    documents = twenty_documents() if documents is None else documents
    trainer = DFlashTrainer(
        make_drafter(target) if drafter is None else drafter,
        target,
        DFlashTrainingArguments(**{**values, **arguments}),
        train_dataset=documents,
        eval_dataset=[{**document, "source": f"source {i % 2}"} for i, document in enumerate(documents[:6])],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


# Metrics that count best guesses are recorded where the weights are still those of the start: later on, two logits
# that nearly tie could change places.
COUNTED = ("acceptance_length", "accuracy", "full_blocks")
COUNTED_STEPS = 3
TIMED = re.compile("time|per_second|seconds|train_loss|total_flos|memory|target_|drafter_|wait|share|epoch")


def all_figures(trainer: Any, shown: dict[str, float]) -> dict[str, float]:
    """Those of an evaluation that are shown, and the details that only the state's log has."""
    return shown | trainer.state.log_history[-1]["details"]


def twenty_steps(
    folder: Path, target: Any, documents: list | None = None, counted_steps: int = COUNTED_STEPS, **arguments: Any
) -> dict[str, Any]:
    trainer = make_trainer(folder, target, documents=documents, **arguments)
    evaluation = all_figures(trainer, trainer.evaluate())
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    logs = [{**entry, **entry["details"]} for entry in trainer.state.log_history if "loss" in entry]
    return {
        "evaluation before": {name: value for name, value in evaluation.items() if not TIMED.search(name)},
        "steps": [
            {name: entry[name] for name in ("step", "loss", "grad_norm", "learning_rate", "epoch")} for entry in logs
        ],
        "metrics": [{name: entry[name] for name in COUNTED} for entry in logs[:counted_steps]],
        "evaluation after": {
            name: value
            for name, value in all_figures(trainer, trainer.evaluate()).items()
            if name == "eval_loss" or (counted_steps == 20 and not TIMED.search(name))
        },
        # How far each parameter went. Muon's matrices go by roundings to bfloat16.
        "ways": {
            name: float((parameter.detach() - before[name]).norm())
            for name, parameter in trainer.model.named_parameters()
            if parameter.dim() == 1 or not trainer.args.muon
        },
    }


def training(folder: Path) -> dict[str, Any]:
    """Losses, gradient norms and ways of 20 steps on a CPU in fp32."""
    dense, hybrid = dense_target(), hybrid_target()
    return {
        "dense": twenty_steps(folder / "a", dense, gradient_accumulation_steps=2),
        "dense, easy documents": twenty_steps(
            folder / "easy", dense, easy_documents(), counted_steps=20, learning_rate=1e-3
        ),
        "dense, dpace by muon": twenty_steps(folder / "b", dense, objective="dpace", muon=True, context_noise=0),
        "dense, kl": twenty_steps(folder / "c", dense, objective="kl", slot_weights="decay", loss_temperature=2.0),
        "hybrid": twenty_steps(folder / "d", hybrid, gradient_accumulation_steps=2),
        "hybrid, lk_hybrid": twenty_steps(folder / "e", hybrid, objective="lk_hybrid", cross_entropy_share=0.25),
    }


# Tokenising

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}"
    "{% if loop.last or preserve_thinking %}<think>\n{{ m['reasoning_content'] }}\n</think>\n\n{% endif %}{% endif %}"
    "{{ m['content'] }}"
    "{% for call in m['tool_calls'] %}[{{ call['function']['name'] }}"
    "{% for key, value in call['function']['arguments'] | items %} {{ key }}={{ value }}{% endfor %}]{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)


def chat(*contents: str, **extra: Any) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)], **extra}


def source_files() -> dict[str, bytes]:
    """Files of chats: plain ones, thinking and tools, and bad rows among good ones."""
    says = {"role": "assistant"}
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"x": 1, "y": "b"}'}}
    thinking = [
        {"messages": [{"role": "user", "content": "hi"}, {**says, "content": "hello", "reasoning_content": "hm"}]},
        chat("a", "<think>\nso\n</think>\n\nthen"),
        chat("a", "b", "c", "d", chat_template_kwargs={"enable_thinking": False}),
        {
            "messages": [
                {"role": "user", "content": "add"},
                {**says, "content": None, "reasoning_content": "use it", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "2"},
                {**says, "content": "done", "reasoning_content": "it is 2"},
            ],
            "tools": [{"type": "function", "function": {"name": "add"}}],
        },
        {
            "request": {"model": "org/model", "messages": [{"role": "user", "content": "say"}]},
            "response": {
                "model": "org/model",
                "choices": [{"message": {**says, "content": "a"}, "finish_reason": "stop"},
                            {"message": {**says, "content": "bc"}, "finish_reason": "length"}],
            },
        },
    ]  # fmt: skip
    answers = [chat(f"Question {i}?", f"Answer {i} é🙂.", language="en" if i % 2 else "de") for i in range(8)]
    others = [
        chat("long", "0123456789" * 9),
        chat("b" * 130, "c"),
        chat("cut", "off", finish_reason="length"),
        chat("e", "", finish_reason="length"),
        chat("ids", "text", completion_token_ids=[270, 3, 258], source="given"),
        chat("text", "write <|im_end|> here"),
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "system": "s"},
        {"prompt": "p", "completion": "q", "reasoning_content": "r"},
    ]
    bad = [
        b'{"messages": [',
        b'["messages"]',
        b'{"messages": "\xff"}',
        b"{}",
        b"",
        *(
            json.dumps(row).encode()
            for row in (
                chat("a"),
                chat("a", "b\ud83d"),
                chat(" ", "b"),
                {"messages": [{"role": "asistant", "content": "a"}]},
                {"messages": [{**says, "content": "a"}]},
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, {**says, "content": "b"}]},
                chat("a", "b", tools="[{"),
                chat("a", "b", response="c"),
                chat("a", "b", completion_token_ids=[1, -2]),
                {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
            )
        ),
    ]

    def lines(rows: list[dict]) -> list[bytes]:
        return [json.dumps(row).encode() for row in rows]

    files = {"answers.jsonl": lines(answers + others), "thinking.jsonl": lines(thinking)}
    files["sub/bad rows.jsonl"] = [*bad[:8], *lines(answers[:1]), *bad[8:]]
    files["notes.txt"] = [b"not read"]
    return {name: b"\n".join(rows) + b"\n" for name, rows in files.items()}


def tokenizing(folder: Path) -> dict[str, Any]:
    """Documents, manifest and files of tokenising jobs over JSON lines with thinking, tools and bad rows."""
    for name, content in source_files().items():
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "in" / name).write_bytes(content)
    jobs = {
        "chatml": (byte_tokenizer(), TokenizeOptions(eval_fraction=0.25, max_length=100)),
        "thinking": (byte_tokenizer(TEMPLATE), TokenizeOptions(infer_thinking=True, preserve_thinking=True)),
        "windows": (
            byte_tokenizer(),
            TokenizeOptions(max_length=60, long_documents="windows", merge_turns=False, source="mine"),
        ),
        "last turn": (
            byte_tokenizer(TEMPLATE),
            TokenizeOptions(last_turn_only=True, enable_thinking=False, eos_token_ids=[10]),
        ),
    }
    record = {}
    for name, (tokenizer, options) in jobs.items():
        output = folder / name
        manifest = tokenize_files(folder / "in", output, tokenizer, options, disable_tqdm=True)
        splits = [split for split in ("train", "eval") if manifest["documents"].get(split)]
        record[name] = {
            "files": sorted(path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()),
            "manifest": manifest,
            "the file holds it": json.loads((output / "manifest.json").read_text()) == manifest,
            "documents": {split: list(load_documents(output, tokenizer, split)) for split in splits},
        }
    rows = [row for name in ("answers.jsonl", "thinking.jsonl") for row in read_completions(folder / "in" / name)]
    settings: dict[str, Any] = {"max_length": 40, "on_error": "skip", "disable_tqdm": True}
    record["in memory"] = list(tokenize_completions(rows, byte_tokenizer(), **settings))
    return record


# The validator


def console_command() -> Callable[[list[str]], int]:
    """What `dflash-hf` runs, as setup.cfg has it."""
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    module, _, name = settings["options.entry_points"]["console_scripts"].partition("=")[2].strip().partition(":")
    return getattr(import_module(module), name)


def example_folders(folder: Path) -> Iterator[tuple[str, Path]]:
    """A folder for each example of a checkpoint, sound, broken or unreadable."""
    yield "sound", write(folder / "sound", CONFIG, zlab_tensors())
    for k, (name, example) in enumerate(EXAMPLES.items()):
        yield name, example.write(folder / f"broken-{k}")
    for k, (name, (fields, drop, tensors)) in enumerate(GOOD.items()):
        config = {key: value for key, value in {**CONFIG, **fields}.items() if key not in drop}
        yield f"good: {name}", write(folder / f"good-{k}", config, zlab_tensors(**tensors))
    for name, config in PUBLISHED.items():
        yield f"published: {name}", write_folder(folder / f"published-{name}", small(config))
    for name in UNREADABLE:
        yield f"unreadable: {name}", unreadable(name, folder / f"unreadable-{name}")


def flat(report: dict[str, Any]) -> dict[str, Any]:
    """A report as one dict of values by their paths, in which a rule goes by its id; lists stay whole.

    What a rule is for each reader becomes one text, in the order of the readers.
    """
    found: dict[str, Any] = {}

    def walk(value: Any, place: str) -> None:
        if isinstance(value, dict) and list(value) == list(report["readers"]) and place.endswith("/status"):
            found[place] = " ".join(value.values())
        elif isinstance(value, dict) and value:
            for key, item in value.items():
                walk(item, f"{place}/{key}" if place else key)
        else:
            found[place] = value

    walk({**report, "rules": {rule["id"]: rule for rule in report["rules"]}}, "")
    return found


def validator(folder: Path) -> dict[str, Any]:
    """The validator's JSON: whole for the sound example, and for each other one all that differs from it."""
    reports = {name: (path, validate_checkpoint(path).to_dict()) for name, path in example_folders(folder)}
    texts = {name: (str(path), json.dumps(report)) for name, (path, report) in reports.items()}
    without_folders = {name: json.loads(text.replace(path, "FOLDER")) for name, (path, text) in texts.items()}
    sound = without_folders.pop("sound")
    same = flat(sound)
    record: dict[str, Any] = {"sound": sound, "differences": {}}
    for name, report in without_folders.items():
        values = flat(report)
        changed = {key: value for key, value in values.items() if same.get(key, "(missing)") != value}
        record["differences"][name] = changed | {key: "(missing)" for key in same if key not in values}
    record["command"] = {}
    for name in ("sound", "mask is eos", "transposed"):
        path = reports[name][0]
        for words in (["validate", str(path)], ["validate", "--json", str(path)]):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                status = console_command()(words)
            text = printed.getvalue()
            is_json = "--json" in words
            shown = json.loads(text) == reports[name][1] if is_json else text.replace(str(path), "FOLDER").splitlines()
            record["command"][f"{name}{', as JSON' if is_json else ''}"] = {"status": status, "printed": shown}
    return record


# Cards and published folders

RESULTS_OF_THE_DEMO = {
    "evaluation": {"eval_acceptance_length": 2.25, "walked_acceptance_length": 2.2},
    "answers": [],
    **{
        name: {
            "before": {"acceptance_length": 1.0, "num_prompts": number, "max_new_tokens": 48, "prompts": []},
            "after": {
                "acceptance_length": after,
                "num_prompts": number,
                "max_new_tokens": 48,
                "speed_up": 1.375,
                "slot_acceptance": [0.75, 0.5, 0.25, 0.125, 0.0625, 0.03, None],
                "prompts": [],
            },
            "after_interval": [after - 0.25, after + 0.5],
        }
        for name, number, after in (("seen", 10, 4.38), ("unseen", 24, 1.16))
    },
}
RESULTS_OF_AN_EVALUATION = {
    "settings": {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_new_tokens": 64, "dtype": "auto",
        "target_dtype": "torch.bfloat16", "enable_thinking": False, "hardware": "NVIDIA H200",
        "versions": {"torch": "2.11", "transformers": "5.24"},
    },
    "drafters": {
        "first": {
            "acceptance_length": 3.2, "num_prompts": 12, "interval": [3.0, 3.4], "speed_up": 2.5,
            "slot_acceptance": [0.9, 0.7, None], "prompts": [],
            "by_source": {
                "humaneval": {"acceptance_length": 3.5, "num_prompts": 6, "speed_up": None, "slot_acceptance": []},
                "gsm8k": {"acceptance_length": 2.9, "num_prompts": 6, "speed_up": 2.0, "slot_acceptance": []},
            },
        },
        "/somewhere/second": {"acceptance_length": 1.5},
    },
}  # fmt: skip
FACTS = {
    "format": 1,
    "target": {
        "id": "org/target", "revision": "abc123", "digest": "d" * 64, "model_type": "llama", "dtype": "bfloat16",
        "quantised": "quanto int8",
    },
    "continued_from": "org/base-DFlash", "is_continued": True,
    "adapter": {"default": {"r": 16, "type": "LORA"}},
    "recipe": {"enable_thinking": True, "learning_rate": 1e-3, "objective": "dpace"},
    "steps": 1200, "epochs": 3.0, "hours": 4.25, "hours_since_step": 0, "hardware": "2 x NVIDIA H200",
    "versions": {"torch": "2.11", "transformers": "5.24"}, "git_commit": "0123abc",
    "data": {
        "documents": 1000, "tokens": 200000, "supervised_tokens": 150000, "tokens_seen": 600000,
        "longest_document": 4096, "digest": "e" * 64,
        "manifest": {"template_hash": "f" * 64, "thinking": "inferred"},
    },
}  # fmt: skip


def publish(drafter: Path, output: Path, *words: str) -> str:
    """Run `dflash-hf publish` without sending anything; what it prints."""
    given = ["--drafter", str(drafter), "--repo_id", "me/tiny-DFlash", "--output_dir", str(output)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        publishing.main([*given, "--dry_run", "true", *words])
    return printed.getvalue()


def drafter_folder(folder: Path, drafter: DFlashDraftModel, **files: Any) -> Path:
    """A drafter as a run leaves it, in fp32, with JSON files beside it."""
    drafter.save_pretrained(folder)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "optimizer.pt").write_bytes(b"not published")
    return folder


def card_of(folder: Path, drafter: Path, *words: str) -> list[str]:
    publish(drafter, folder, *words)
    return (folder / "README.md").read_text(encoding="utf-8").splitlines()


MACHINE_ROWS = r"\| (time|hardware|versions|code)\b"


def a_run(folder: Path) -> dict[str, Any]:
    """Files, facts and card of a short run."""
    target = llama_target()
    target.save_pretrained(folder / "target")
    trainer = make_trainer(folder / "run", str(folder / "target"), make_drafter(target), max_steps=2, muon=True)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    card = (folder / "run" / "README.md").read_text().splitlines()
    return {
        "files": sorted(path.name for path in (folder / "run").iterdir()),
        "training.json": json.loads((folder / "run" / "training.json").read_text()),
        # Times, versions and the hashes of weights and documents are this machine's.
        "card": [re.sub(r"`[0-9a-f]{12}`", MASKED, line) for line in card if not re.match(MACHINE_ROWS, line)],
    }


def cards(folder: Path) -> dict[str, Any]:
    """Cards: of a drafter as the demo leaves it, of one of which all is known, and of a run.

    Those in model_cards/ are compared with what recipes/model_cards.py writes by `test_model_card.py`.
    """
    # The demo's first act: its recipe, what its training tells, and the results that it measured.
    target = llama_target(num_layers=9)
    shape = {"num_hidden_layers": 2, "num_taps": 5, "block_size": 8}
    facts = {
        "format": 1,
        "target": {"id": None, "revision": None, "digest": "d" * 64, "model_type": "llama", "dtype": "float32",
            "quantised": None,
        },
        "continued_from": None, "is_continued": False, "adapter": {},
        "recipe": {"learning_rate": 0.0048, "num_train_epochs": 8, "num_anchors": 64, "muon": True, "row_length": 512},
        "steps": 80, "epochs": 8.0, "hours": 0.05, "hours_since_step": 0, "hardware": "CPU (x86_64), 2 threads",
        "versions": {"torch": "2.11", "transformers": "5.24"}, "git_commit": None,
        "data": {
            "documents": 40, "tokens": 9000, "supervised_tokens": 7000, "tokens_seen": 72000,
            "longest_document": 300, "digest": "e" * 64, "manifest": None,
        },
    }  # fmt: skip
    plain_layers = {"layer_types": [FULL, FULL], "sliding_window": None, "use_sliding_window": False}
    demo = drafter_folder(
        folder / "demo", make_drafter(target, **shape, **plain_layers), training=facts, results=RESULTS_OF_THE_DEMO
    )
    told = drafter_folder(folder / "told", make_drafter(target), training=FACTS, results=RESULTS_OF_AN_EVALUATION)
    (told / "curve.png").write_bytes(b"x")
    hybrid = {"format": 1, "target": {"id": "org/hybrid", "model_type": "qwen3_5_text"}}
    untold = drafter_folder(folder / "untold", make_drafter(hybrid_target()), training=hybrid)
    return {
        "demo": card_of(folder / "a", demo, "--base_model", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        "all that can be told": card_of(
            *(folder / "b", told, "--results_drafter", "first", "--license", "mit", "--languages", "en", "de"),
            *("--limits", "A limit.", "Another one."),
        ),
        "hybrid target, not measured": card_of(folder / "c", untold),
        "the second act's drafter": card_of(folder / "d", ROOT / "recipes" / "smollm2-135m" / "drafter"),
        "a run": a_run(folder / "e"),
    }


def published(folder: Path) -> dict[str, Any]:
    """Files, configuration and tensors of a folder that would be pushed, and configurations written again."""
    drafter = make_drafter(hybrid_target())
    source = drafter_folder(folder / "drafter", drafter, training=FACTS, results=RESULTS_OF_AN_EVALUATION)
    (source / "curve.png").write_bytes(b"x")
    printed = publish(source, folder / "out", "--results_drafter", "first", "--fp32", "true")
    output = folder / "out"
    record: dict[str, Any] = {
        "files": sorted(path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()),
        "printed": [re.sub(r" +[\d.]+ [kM]?B$", " (size)", line) for line in printed.split("\n---\n")[0].splitlines()],
        "ends in": printed.splitlines()[-1],
        "results.json": json.loads((output / "results.json").read_text()),
    }
    for name in (".", "fp32"):
        with safe_open(output / name / "model.safetensors", "pt") as weights:
            slices = {key: weights.get_slice(key) for key in sorted(weights.keys())}
            tensors = {key: [part.get_dtype(), part.get_shape()] for key, part in slices.items()}
            record[name] = {
                "config.json": json.loads((output / name / "config.json").read_text()),
                "metadata": weights.metadata(),
                "tensors": tensors,
            }
    again = {}
    for name, config in PUBLISHED.items():
        came = write_folder(folder / name, small(config))
        DFlashDraftModel.from_pretrained(came).save_pretrained(folder / f"{name}-again")
        again[name] = json.loads((folder / f"{name}-again" / "config.json").read_text())
    record["configurations as on the Hub, written again"] = again
    return record


# Decoding

PROMPTS = ([5, 80, 3, 201, 17, 42, 9], [7], numbers(30, 9, 0, 256))
NEW_TOKENS = 40
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}


class Guesser(DFlashDraftModel):
    """A drafter whose guesses come from a table of which token follows which, so that some are right.

    What its weights say is kept: the token of the highest logit of each slot, and that logit.
    """

    def knows(self, target: Any, follower: dict[int, int]) -> "Guesser":
        self.follower, self.said = follower, []
        self.embeddings = target.get_input_embeddings().weight.detach()
        self.head = target.get_output_embeddings().weight.detach()
        return self

    def forward(self, noise_embeds, *args, **kwargs):
        output = super().forward(noise_embeds, *args, **kwargs)
        highest = (output.last_hidden_state[0, 1:] @ self.head.T).max(-1)
        self.said.append([highest.indices.tolist(), highest.values.tolist()])
        (token,) = (self.embeddings == noise_embeds[0, 0]).all(-1).nonzero()[:1, 0].tolist()
        guesses = []
        for _ in range(noise_embeds.shape[1] - 1):
            token = self.follower.get(token, 0)
            guesses.append(token)
        if len(self.said) % 3 == 0:
            guesses[2] = (guesses[2] + 1) % 256
        output.last_hidden_state = torch.cat([output.last_hidden_state[:, :1], self.head[guesses][None]], dim=1)
        return output


@torch.no_grad()
def make_counting(target: Any) -> dict[int, int]:
    """Make a target often write token t + 1 after token t, so that sampled answers can be guessed; that as a table."""
    embeddings = target.get_input_embeddings().weight
    embeddings.mul_(10)
    target.get_output_embeddings().weight.add_(0.1 * embeddings.roll(1, 0))
    return {token: (token + 1) % len(embeddings) for token in range(len(embeddings))}


def decode(target: Any) -> dict[str, Any]:
    """Tokens, greedy and sampled, and what each verification committed."""
    guesser = Guesser(make_drafter(target, block_size=6).config).eval()
    guesser.load_state_dict(make_drafter(target, block_size=6).state_dict())
    prompts = [torch.tensor([prompt]) for prompt in PROMPTS]
    by_generate: dict[str, Any] = {"custom_generate": speculative_decoding, "drafter": guesser, "max_new_tokens": 30}

    def run(ids: torch.Tensor, **settings: Any) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        output = speculative_generate(target, guesser, ids, NEW_TOKENS, generator=generator, **settings)
        told = {"committed": output.committed, "accepted": output.accepted}
        return {"tokens": output.sequences[0, ids.shape[1] :].tolist(), **told}

    record: dict[str, Any] = {}
    for number, ids in enumerate(prompts):
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW_TOKENS}
        alone = target.generate(ids, **settings)[0].tolist()
        guesser.knows(target, dict(itertools.pairwise(alone)))
        stop = [alone[ids.shape[1] + 20], 271]
        record[f"prompt {number}, greedy"] = {
            "alone": alone[ids.shape[1] :],
            "speculative": run(ids),
            # Of some rounds: one after the other they say much the same.
            "what the drafter said": [*guesser.said[:3], guesser.said[-1]],
            "until a token": run(ids, eos_token_id=stop),
            "without caches": run(ids, use_cache=False),
            "by generate": target.generate(ids, do_sample=False, **by_generate)[0].tolist(),
        }
    guesser.knows(target, make_counting(target))
    for number, ids in enumerate(prompts):
        torch.manual_seed(5)
        record[f"prompt {number}, sampled"] = {
            "speculative": run(ids, **SAMPLED),
            "drafts too": run(ids, sample_drafts=True, **SAMPLED),
            "without cut": run(ids, temperature=0.7),
            "by generate": target.generate(ids, do_sample=True, min_p=0.02, **SAMPLED, **by_generate)[0].tolist(),
        }
    return record


def decoding(folder: Path) -> dict[str, Any]:
    """Greedy and sampled decoding of a dense and of a hybrid target."""
    return {"dense": decode(dense_target()), "hybrid": decode(hybrid_target())}


RECORDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "collator": collator,
    "training": training,
    "tokenizing": tokenizing,
    "validator": validator,
    "cards": cards,
    "decoding": decoding,
    "published": published,
}


# Masking, comparing, writing


def masked(value: Any, folder: Path) -> Any:
    """JSON values without what belongs to this machine, this day and the installed versions."""
    if isinstance(value, dict):
        return {key: MASKED if key in MASKED_FIELDS else masked(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item, folder) for item in value]
    if isinstance(value, str):
        return value.replace(str(folder), "FOLDER").replace(str(ROOT), "REPOSITORY")
    return value


def compute(name: str) -> dict[str, Any]:
    """A record, made now."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        cache, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, folder / "cache"
        try:
            record = RECORDS[name](folder)
        finally:
            datasets.config.HF_DATASETS_CACHE = cache
        # As a file would give it back: tuples are lists, keys are texts.
        return json.loads(json.dumps(masked(record, folder)))


def differences(recorded: Any, now: Any, place: str = "") -> Iterator[str]:
    """Where a record and what is computed now differ."""
    if isinstance(recorded, float) and isinstance(now, float):
        if not math.isclose(recorded, now, rel_tol=TOLERANCE):
            yield f"{place}: recorded {recorded!r}, now {now!r}"
    elif isinstance(recorded, dict) and isinstance(now, dict):
        if recorded.keys() != now.keys():
            yield f"{place}: lost {sorted(recorded.keys() - now.keys())}, new {sorted(now.keys() - recorded.keys())}"
        for key in sorted(recorded.keys() & now.keys()):
            yield from differences(recorded[key], now[key], f"{place}/{key}")
    elif isinstance(recorded, list) and isinstance(now, list):
        if len(recorded) != len(now):
            yield f"{place}: recorded {len(recorded)} entries, now {len(now)}; those at the same places:"
        for index, (one, other) in enumerate(zip(recorded, now, strict=False)):
            yield from differences(one, other, f"{place}/{index}")
    elif type(recorded) is not type(now) or recorded != now:
        yield f"{place}: recorded {_short(recorded)}, now {_short(now)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} characters)"


def dump(value: Any, indent: str = "") -> str:
    """JSON with one line for each entry, and a list of numbers on one line."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        lines = (f"{inner}{json.dumps(key, ensure_ascii=False)}: {dump(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (str, dict, list)) for item in value):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if len(text) <= 110:
            return text
        return "[\n" + ",\n".join(f"{inner}{dump(item, inner)}" for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def path_of(name: str) -> Path:
    return HERE / f"{name}.json"


def main(names: list[str]) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if unknown := [name for name in names if name not in RECORDS]:
        sys.exit(f"There is no record {unknown[0]!r}: expected some of {', '.join(RECORDS)}.")
    for name in names or RECORDS:
        now, path = compute(name), path_of(name)
        found = list(differences(json.loads(path.read_text()), now)) if path.exists() else ["new"]
        print(f"{name}: {len(found) or 'no'} differences", *found[:20], sep="\n  ")
        if found:
            path.write_text(dump(now) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
