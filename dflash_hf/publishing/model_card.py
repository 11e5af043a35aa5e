# SPDX-License-Identifier: Apache-2.0
"""The model card of a drafter, made from its configuration, what the run knows and what was measured."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..validation.checkpoint import Checkpoint
from ..validation.validate import serving_commands
from .card_options import CardOptions
from .card_results import CardResults
from .card_sections import acceptance, in_python, licence_text, limits, sizes, training
from .training_facts import hub_id


TEMPLATE = Path(__file__).with_name("model_card_template.md")
TAGS = ("dflash", "speculative-decoding", "draft-model")
# Recurrent targets, whose state speculative decoding has to roll back.
HYBRID_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")


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
    for name, field, what in ((target, "base_model", "the target"), (adapted_from, "adapted_from", "that drafter")):
        if name is not None and hub_id(name) is None:
            raise ValueError(
                f"The card would name {name}, which is no repository of the Hub but a local path. Give the Hub id of "
                f"{what} as {field}, or leave it out."
            )
    named = replace(checkpoint, base_model=target)
    serving = serving_commands(named)
    model_type = (facts.get("target") or {}).get("model_type")
    text = sizes(checkpoint) | {
        "name": checkpoint.name.split("/")[-1],
        "planned": options.planned,
        "repo_id": checkpoint.name,
        "target": f"[{target}](https://huggingface.co/{target})" if target else "a target that this card cannot name",
        "target_id": target,
        "target_was_local": bool(facts.get("target")),
        "adapted_from": _origin(facts, adapted_from),
        "acceptance": acceptance(results, options, checkpoint.block_size),
        "serving": serving,
        "in_python": in_python(serving, checkpoint.name, target or "TARGET", model_type in HYBRID_TYPES),
        "training": training(facts, options),
        "limits": limits(facts, checkpoint, options),
        "licence_text": licence_text(options.license, adapted_from or (_origin(facts, None) and "the first drafter")),
    }
    data = _metadata(checkpoint.name, target, results, options)
    return ModelCard.from_template(data, template_path=str(TEMPLATE), **text)


def _origin(facts: dict[str, Any], adapted_from: str | None) -> str | None:
    """The drafter that this one was adapted from, as text; None for one that was trained from nothing."""
    if adapted_from:
        return f"[{adapted_from}](https://huggingface.co/{adapted_from})"
    return "a drafter that this card cannot name" if facts.get("is_continued") or facts.get("adapter") else None


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


__all__ = ["CardOptions", "model_card"]
