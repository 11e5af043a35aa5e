# SPDX-License-Identifier: Apache-2.0
"""What a drafter of the study knows of its training, in the words of the trainer's own runs."""

from typing import Any

from dflash_hf.model_card import FORMAT, differing_arguments


TARGET = {"id": "HuggingFaceTB/SmolLM2-135M-Instruct", "model_type": "llama"}
# Fields of a run that arguments of the trainer have the names of.
SAME = ("objective", "learning_rate", "muon", "weight_decay", "max_grad_norm", "context_noise", "num_anchors", "seed")


def study_recipe(run: dict[str, Any]) -> dict[str, Any]:
    """A run of the study (its line in results.jsonl) as arguments of the trainer."""
    return {name: run[name] for name in SAME} | {"max_steps": run["steps"], "max_length": run["row_length"]}


def study_facts(run: dict[str, Any]) -> dict[str, Any]:
    """What `training.json` beside the drafter of a run says, for its card and for those who train it further."""
    return {"format": FORMAT, "target": TARGET, "recipe": differing_arguments(study_recipe(run))}
