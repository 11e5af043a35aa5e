# SPDX-License-Identifier: Apache-2.0
"""The model card of a drafter, made from its configuration, what the run knows and what was measured."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..checkpoint_tensors import WEIGHT_DTYPES
from ..validation.checkpoint import Checkpoint
from ..validation.validate import serving_commands
from .card_results import CardResults
from .training_facts import hub_id


TEMPLATE = Path(__file__).with_name("model_card_template.md")
TAGS = ("dflash", "speculative-decoding", "draft-model")
# Recurrent targets, whose state speculative decoding has to roll back.
HYBRID_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
_PREAMBLE = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
"""
_PROMPT = """tokenizer = AutoTokenizer.from_pretrained({target})
messages = [{{"role": "user", "content": "What is the capital of France?"}}]
inputs = tokenizer.apply_chat_template(
    messages,
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)
input_ids = inputs["input_ids"]
"""


@dataclass(frozen=True)
class CardOptions:
    """What the publisher says, and no file knows.

    Args:
        base_model: Hub id of the target; by default the one that the run recorded.
        license: Identifier of the licence, such as "apache-2.0".
        languages: Codes of the languages of the training data.
        plots: File names of images in the repository.
        adapted_from: Hub id of the drafter it was adapted from; by default the one that the run recorded.
        train_command: How to repeat the training.
        results_command: How to repeat the measurement.
        limits: Further limits, one sentence each.
        planned: Whether the card is of a drafter that is not trained yet.
    """

    base_model: str | None = None
    license: str | None = None
    languages: Sequence[str] = ()
    plots: Sequence[str] = ()
    adapted_from: str | None = None
    train_command: str | None = None
    results_command: str | None = None
    limits: Sequence[str] = field(default=())
    planned: bool = False


def model_card(
    checkpoint: Checkpoint,
    facts: dict[str, Any] | None = None,
    results: CardResults | None = None,
    options: CardOptions | None = None,
) -> ModelCard:
    """A card with metadata that the Hub accepts; needs no network.

    Args:
        checkpoint: The drafter under the name of its repository, as [`validation.reading.read_folder`] reads it.
        facts: What [`training_facts`] wrote about the run.
        results: What was measured.
        options: What the publisher adds.

    Raises:
        ValueError: A name that should be a repository id is a path.
    """
    facts, options = facts or {}, options or CardOptions()
    target = options.base_model or (facts.get("target") or {}).get("id")
    adapted_from = options.adapted_from or facts.get("continued_from")
    for name in (target, adapted_from):
        if name is not None and hub_id(name) is None:
            raise ValueError(
                f"The card would name {name}, which is no repository of the Hub but a local path. Give the Hub id of "
                "the target as base_model, or leave it out."
            )
    named = replace(checkpoint, base_model=target)
    serving = serving_commands(named)
    model_type = (facts.get("target") or {}).get("model_type")
    text = _sizes(checkpoint) | {
        "name": checkpoint.name.split("/")[-1],
        "planned": options.planned,
        "repo_id": checkpoint.name,
        "target": f"[{target}](https://huggingface.co/{target})" if target else "a target that this card cannot name",
        "target_id": target,
        "adapted_from": adapted_from and f"[{adapted_from}](https://huggingface.co/{adapted_from})",
        "acceptance": _acceptance(results, options, checkpoint.block_size),
        "serving": serving,
        "in_python": _in_python(serving, checkpoint.name, target or "TARGET", model_type in HYBRID_TYPES),
        "training": _training(facts, options),
        "limits": "\n".join(f"- {limit}" for limit in [*_limits(facts, checkpoint), *options.limits]),
        "licence_text": _licence_text(options.license),
    }
    data = _metadata(checkpoint.name, target, results, options)
    return ModelCard.from_template(data, template_path=str(TEMPLATE), **text)


def _acceptance(results: CardResults | None, options: CardOptions, block_size: int | None) -> str:
    """Table, plots and settings of what was measured."""
    parts = ["**Not yet run.**" if options.planned else "**Not yet measured.**"]
    if results is not None:
        parts = [
            "Acceptance length: tokens committed per verification forward of the target (accepted drafts and the "
            f"target's own next token), of at most {block_size}; 1 is what the target does alone."
        ]
        timed = any(row.speed_up is not None for row in results.rows)
        lines = [["prompts", "number", "acceptance length", "95% interval", *(["speed-up"] if timed else [])]]
        lines.append(["---"] * len(lines[0]))
        for row in results.rows:
            interval = "-" if row.low is None or row.high is None else f"{row.low:.2f} to {row.high:.2f}"
            cells = [row.prompts, str(row.number), f"{row.acceptance_length:.2f}", interval]
            lines.append([*cells, *(["-" if row.speed_up is None else f"{row.speed_up:.2f}"] if timed else [])])
        parts += [_table(lines), results.settings]
    if options.results_command:
        parts.append(
            f"{'Measured by' if results else 'It will be measured by'}\n\n{_code('bash', options.results_command)}"
        )
    parts += [f"![{Path(plot).stem}]({quote(plot)})" for plot in options.plots]
    return "\n\n".join(parts)


def _in_python(serving: dict[str, str], repo_id: str, target: str, hybrid: bool) -> str:
    if hybrid:
        return (
            "The target has recurrent layers: transformers' `generate` refuses it, and z-lab's package changes its "
            "text. `dflash_hf.generation.speculative_generate` decodes with it."
        )
    return "\n\n".join(
        [
            "With transformers and dflash_hf (without it, "
            f'`AutoModel.from_pretrained("{repo_id}", trust_remote_code=True)` loads the drafter):',
            _code("python", python_example(serving["transformers"], target)),
            "With z-lab's package (`pip install dflash`):",
            _code("python", python_example(serving["z-lab"], target)),
        ]
    )


def _training(facts: dict[str, Any], options: CardOptions) -> str:
    parts = []
    if "steps" in facts:
        parts.append(
            _table(
                [
                    ["", ""],
                    ["---", "---"],
                    *([label, value] for label, value in _training_rows(facts, options.base_model)),
                ]
            )
        )
    elif not options.train_command:
        parts.append("No record of the run is at hand.")
    if facts.get("recipe"):
        recipe = yaml.safe_dump(facts["recipe"], sort_keys=True).strip()
        parts += ["Where the recipe differs from the defaults of `DFlashTrainingArguments`:", _code("yaml", recipe)]
    if options.train_command:
        parts += [f"{'Not yet run' if options.planned else 'The command'}:", _code("bash", options.train_command)]
    return "\n\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def python_example(snippet: str, target: str) -> str:
    """A snippet of [`validation.serving_commands`] as a program that runs by itself.

    Args:
        snippet: Imports in its first line, loads both models, and decodes.
        target: The target's name in it.
    """
    # As formatters write it.
    snippet = re.sub(r"\(\n\s+(.*)\n\)", r"(\1)", snippet.replace("'", '"'))
    first, *rest = snippet.splitlines()
    code = [_PREAMBLE + first.split("  #")[0], "", _PROMPT.format(target=json.dumps(target)).rstrip(), "", *rest]
    return "\n".join([*code, "print(tokenizer.decode(output_ids[0, input_ids.shape[1] :], skip_special_tokens=True))"])


def _metadata(repo_id: str, target: str | None, results: CardResults | None, options: CardOptions) -> ModelCardData:
    name = repo_id.split("/")[-1]
    evaluations = [
        EvalResult(
            task_type="text-generation",
            # The metrics of one type of data set would be joined.
            dataset_type=re.sub(r"[^a-z0-9]+", "-", row.prompts.lower()).strip("-"),
            dataset_name=row.prompts,
            metric_type="acceptance_length",
            metric_name="Acceptance length",
            metric_value=round(row.acceptance_length, 3),
        )
        for row in (results.rows if results else ())
    ]
    extra: dict[str, Any] = {}
    if target:
        # The Hub knows finetune, adapter, merge and quantized; a drafter adds weights to a base that stays as it is.
        extra["base_model_relation"] = "adapter"
    return ModelCardData(
        base_model=target,
        language=list(options.languages) or None,
        library_name="transformers",
        license=options.license,
        pipeline_tag="text-generation",
        tags=list(TAGS),
        model_name=name if evaluations else None,
        eval_results=evaluations or None,
        **extra,
    )


def _sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    headers = checkpoint.headers or {}
    number = sum(prod(shape) for _, shape in headers.values())
    kinds = checkpoint.value("layer_types") or []
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    full = len(kinds) - sliding
    window = checkpoint.value("sliding_window")
    parts = [f"{full} with full attention"] if full else []
    parts += [f"{sliding} with a window of {window} tokens"] if sliding else []
    return {
        "block_size": checkpoint.block_size,
        "taps": ", ".join(str(tap) for tap in checkpoint.taps or []),
        "num_target_layers": checkpoint.value("num_target_layers"),
        "num_layers": checkpoint.value("num_hidden_layers"),
        "layer_kinds": ", ".join(parts),
        "parameters": f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M",
        "dtype": "/".join(sorted({WEIGHT_DTYPES.get(dtype, dtype) for dtype, _ in headers.values()})),
    }


def _training_rows(facts: dict[str, Any], base_model: str | None) -> list[tuple[str, str]]:
    """The table of how a drafter was trained."""
    target, data = facts["target"], facts.get("data")
    revision = f", revision `{target['revision']}`" if target["revision"] else ""
    known = target["id"] or base_model
    name = f"[{known}](https://huggingface.co/{known})" if known else "a local folder"
    # What the publisher names may not be what was in the folder.
    name += " (from a local copy)" if known and not target["id"] else ""
    quantised = f", quantised ({target['quantised']})" if target["quantised"] else ""
    rows = [("target", f"{name}{revision}, {target['dtype']}{quantised}; weights `{target['digest'][:12]}`")]
    for adapter in facts["adapter"].values():
        rows.append(("trained part", f"{adapter['type']} of rank {adapter['r']}, merged"))
    if data:
        manifest = data["manifest"] or {}
        of = f"; chat template `{manifest['template_hash'][:12]}`" if "template_hash" in manifest else ""
        rows += [
            ("documents", f"{data['documents']:,}, written by the target; digest `{data['digest'][:12]}`{of}"),
            ("tokens", f"{data['tokens']:,}, {data['supervised_tokens']:,} of them supervised"),
            ("tokens seen", f"{data['tokens_seen']:,} in {facts['epochs']:g} epochs, {facts['steps']:,} steps"),
        ]
    since = f", from step {facts['hours_since_step']} on" if facts["hours_since_step"] else ""
    hours = facts["hours"]
    rows += [
        ("time", f"{hours:.1f} hours{since}" if hours >= 1 else f"{hours * 60:.1f} minutes{since}"),
        ("hardware", facts["hardware"]),
        ("versions", ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if k in ("torch", "transformers"))),
    ]
    return rows


def _limits(facts: dict[str, Any], checkpoint: Checkpoint) -> list[str]:
    recipe, data, target = facts.get("recipe") or {}, facts.get("data"), facts.get("target") or {}
    thinking = recipe.get("enable_thinking")
    mode = "the chat template's own default" if thinking is None else f"thinking {'on' if thinking else 'off'}"
    limits = [
        "It drafts what the target writes in the way of its training data. Thinking in that data: "
        + (f"{mode}; expect fewer accepted drafts otherwise." if facts else "not recorded."),
        "Languages and domains that the training data lacks were not measured.",
    ]
    if data:
        limits.append(
            f"Trained on texts of up to {data['longest_document']:,} tokens; acceptance beyond that was not measured."
        )
    if target.get("quantised"):
        limits.append(
            f"Trained beside the target quantised as {target['quantised']}; expect fewer accepted drafts beside "
            "other weights."
        )
    else:
        limits.append(
            "Beside quantised or fine-tuned weights of the target it was not measured; expect fewer accepted drafts."
        )
    limits.append(
        "Quantising the drafter itself to 8 or fewer bits was not measured; it changes speed and acceptance, never "
        "the text."
    )
    limits.append(
        f"Blocks longer than {checkpoint.block_size} were not trained; shorter ones can be set where it is served."
    )
    return limits


def _licence_text(license: str | None) -> str:
    if license is None:
        return "The publisher has not stated one; that of the target applies to its outputs, on which it was trained."
    return f"`{license}`. The licence of the target applies to its outputs, on which the drafter was trained."


__all__ = ["CardOptions", "model_card", "python_example"]
