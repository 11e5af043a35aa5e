# SPDX-License-Identifier: Apache-2.0
"""The sections of a drafter's card, as the text that its template takes."""

import json
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from ..checkpoint_tensors import WEIGHT_DTYPES
from ..validation.checkpoint import Checkpoint
from .card_options import CardOptions
from .card_results import CardResults


THINKING = {
    None: "the chat template's own default",
    True: "thinking on",
    False: "thinking off",
    "inferred": "on where an answer holds some, else off",
    "mixed": "of several modes",
}
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


def acceptance(results: CardResults | None, options: CardOptions, block_size: int | None) -> str:
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


def in_python(serving: dict[str, str], repo_id: str, target: str, hybrid: bool) -> str:
    """Programs that decode with the drafter; for a hybrid target the one function that does."""
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


def training(facts: dict[str, Any], options: CardOptions) -> str:
    """What the run recorded, its recipe and the command that repeats it."""
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
    elif not options.train_command and not facts.get("recipe"):
        parts.append("No record of the run is at hand.")
    if facts.get("recipe"):
        recipe = dict(facts["recipe"])
        if "max_steps" in recipe:
            # It overrides the epochs.
            recipe.pop("num_train_epochs", None)
        recipe = yaml.safe_dump(recipe, sort_keys=True).strip()
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


def sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """Fields of the template that say how large the drafter is."""
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
        kind = "LoRA" if adapter["type"] == "LORA" else adapter["type"]
        rows.append(("trained part", f"{kind} of rank {adapter['r']}, merged"))
    if data:
        manifest = data["manifest"] or {}
        of = f"; chat template `{manifest['template_hash'][:12]}`" if "template_hash" in manifest else ""
        rows += [
            (
                "documents",
                f"{data['documents']:,}, taken for the target's own answers; digest `{data['digest'][:12]}`{of}",
            ),
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


def limits(facts: dict[str, Any], checkpoint: Checkpoint, options: CardOptions) -> str:
    """What was not trained or not measured, and what the publisher adds to that."""
    recipe, data, target = facts.get("recipe") or {}, facts.get("data"), facts.get("target") or {}
    # Documents that were tokenised before have their own, which a recipe cannot change.
    tokenised = (data or {}).get("manifest") or {}
    thinking = tokenised.get("thinking", recipe.get("enable_thinking"))
    is_known = bool(facts) and (thinking is not None or not tokenised or "thinking" in tokenised)
    mode = f"{THINKING[thinking]}; expect fewer accepted drafts otherwise." if is_known else "not recorded."
    sentences = [
        f"It drafts what the target writes in the way of its training data. Thinking in that data: {mode}",
        "Languages and domains that the training data lacks were not measured.",
    ]
    if data:
        sentences.append(
            f"Trained on texts of up to {data['longest_document']:,} tokens; acceptance beyond that was not measured."
        )
    if target.get("quantised"):
        sentences.append(
            f"Trained beside the target quantised as {target['quantised']}; expect fewer accepted drafts beside "
            "other weights."
        )
    else:
        sentences.append(
            "Beside quantised or fine-tuned weights of the target it was not measured; expect fewer accepted drafts."
        )
    sentences.append(
        "Quantising the drafter itself to 8 or fewer bits was not measured; it changes speed and acceptance, never "
        "the text."
    )
    sentences.append(
        f"Blocks longer than {checkpoint.block_size} were not trained; shorter ones can be set where it is served."
    )
    return "\n".join(f"- {sentence}" for sentence in [*sentences, *options.limits])


def licence_text(license: str | None, adapted_from: str | None) -> str:
    """Whose licence holds for what."""
    stated = "The publisher has not stated one" if license is None else f"`{license}`"
    base = f" That of {adapted_from} applies to the weights that it was adapted from." if adapted_from else ""
    return f"{stated}. The licence of the target applies to its outputs, on which the drafter was trained.{base}"


__all__ = ["acceptance", "in_python", "licence_text", "limits", "python_example", "sizes", "training"]
