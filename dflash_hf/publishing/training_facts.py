# SPDX-License-Identifier: Apache-2.0
"""What a run knows of itself that a model card tells, kept as `training.json` beside the drafter."""

import json
import platform
import re
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationMethod

from ..data.packing import PackedDataset
from ..runs.record import LEARNING_ARGUMENTS
from ..training.partial_training import is_adapter
from ..training_args import DFlashTrainingArguments


logger = logging.get_logger(__name__)

FACTS_NAME = "training.json"
FORMAT = 1
# Arguments that decide what a drafter becomes; the others say where it runs and what is written.
RECIPE_ARGUMENTS = (
    *(name for name in LEARNING_ARGUMENTS if name != "ignore_data_skip"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "row_length", "max_length", "enable_thinking"),
    *("trainable_modules", "ddp_bf16_compression", "seed", "data_seed"),
)
_REPO_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")


def hub_id(name: Any) -> str | None:
    """A repository id as it is, None for a folder or anything else: no local path is ever published.

    Args:
        name: What a model was loaded from.
    """
    text = str(name or "")
    if not _REPO_ID.fullmatch(text) or Path(text).exists():
        return None
    return text


def differing_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Fields of a recipe that are not the defaults.

    Args:
        arguments: Of `DFlashTrainingArguments.to_dict()`.
    """
    defaults = {field.name: field.default for field in fields(DFlashTrainingArguments)}
    given = {name: arguments[name] for name in RECIPE_ARGUMENTS if name in arguments}
    # A folder among the target's arguments would be a local path.
    given = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in given.items()}
    return {k: v for k, v in given.items() if v not in (defaults.get(k), None, {}) and k != "target_model_init_kwargs"}


def training_facts(trainer: Any, seconds: float, first_step: int) -> dict[str, Any]:
    """What a card says of a run, as JSON values; neither a local path nor a secret is in it.

    Args:
        trainer: The [`DFlashTrainer`] that trained.
        seconds: Spent in training.
        first_step: Step from which on they were counted.
    """
    record, state, target = trainer.run_record, trainer.state, trainer.target.model
    model = trainer.accelerator.unwrap_model(trainer.model)
    quantised = vars(target.config).get("quantization_config")
    adapters = model.peft_config if is_adapter(model) else {}
    facts: dict[str, Any] = {
        "format": FORMAT,
        "target": {
            "id": hub_id(record["target"]["id"]),
            "revision": record["target"]["revision"],
            "digest": record["target"]["digest"],
            "model_type": target.config.get_text_config(decoder=True).model_type,
            "dtype": str(target.get_input_embeddings().weight.dtype).removeprefix("torch."),
            "quantised": None if quantised is None else str(_quantisation(quantised)),
        },
        **_origin(trainer._drafter_config.name_or_path),
        "adapter": {name: {"r": c.to_dict().get("r"), "type": str(c.peft_type.value)} for name, c in adapters.items()},
        "recipe": differing_arguments(record["arguments"]),
        "steps": state.global_step,
        "epochs": round(float(state.epoch or 0), 3),
        "hours": seconds / 3600,
        "hours_since_step": first_step,
        "startup_seconds": record.get("startup_seconds", {}),
        "hardware": _hardware(trainer.args),
        "versions": record["versions"],
        "git_commit": record["git_commit"],
    }
    if isinstance(trainer.train_dataset, PackedDataset):
        facts["data"] = _data(trainer.train_dataset) | {"digest": record["data"]["digest"]}
        facts["data"]["tokens_seen"] = round(facts["data"]["tokens"] * facts["epochs"])
    return facts


def _origin(name: Any) -> dict[str, Any]:
    """Where a drafter's first weights come from: the nearest one on the Hub, and whether they are another's at all."""
    # What a local drafter was continued from gave its weights to this one too.
    earlier = (read_facts(name) or {}) if name else {}
    return {"continued_from": hub_id(name) or earlier.get("continued_from"), "is_continued": bool(name)}


def _data(rows: PackedDataset) -> dict[str, Any]:
    documents = rows.documents
    lengths = np.asarray(rows._lengths)
    supervised = _supervised_tokens(documents)
    description = documents.info.description if isinstance(documents, Dataset) else ""
    manifest = None
    if description and description.startswith("{"):
        manifests = [json.loads(part) for part in description.split("\n\n")]
        modes = {str(part.get("thinking")) for part in manifests}
        manifest = manifests[0] | ({"thinking": "mixed"} if len(modes) > 1 else {})
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(supervised),
        "longest_document": int(lengths.max()),
        "manifest": manifest,
    }


def _supervised_tokens(documents: Any) -> int:
    if not isinstance(documents, Dataset):
        return sum(stop - start for document in documents for start, stop in document["supervised_spans"])
    total = 0
    # Arrow holds the spans of many documents in one array; a Python loop over a million of them would take minutes.
    for table in documents.select_columns(["supervised_spans"]).with_format("arrow").iter(batch_size=10_000):
        for chunk in table["supervised_spans"].chunks:
            bounds = chunk.flatten().flatten().to_numpy()
            total += int((bounds[1::2] - bounds[::2]).sum())
    return total


def _quantisation(config: Any) -> str:
    values = config if isinstance(config, dict) else config.to_dict()
    method = values["quant_method"]
    weights = values.get("weights") or values.get("bits")
    if weights is None:
        weights = "int8" if values.get("load_in_8bit") else "int4" if values.get("load_in_4bit") else None
    return f"{QuantizationMethod(method).value}{f' {weights}' if weights else ''}"


def _hardware(args: DFlashTrainingArguments) -> str:
    if args.device.type == "cuda":
        count = torch.cuda.device_count()
        ranks = f", {args.world_size} ranks" if args.world_size > 1 else ""
        return f"{count} x {torch.cuda.get_device_name(args.device)}{ranks}"
    return f"CPU ({platform.machine()}), {torch.get_num_threads() * args.world_size} threads"


class TrainingFacts(TrainerCallback):
    """Times the run and writes `training.json` at its end.

    Args:
        trainer: The [`DFlashTrainer`] it belongs to.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.seconds, self.first_step, self._start = 0.0, 0, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.seconds, self.first_step, self._start = 0.0, state.global_step, time.monotonic()
        earlier = read_facts(args.output_dir) if state.global_step else None
        if earlier is not None and earlier["steps"] == state.global_step:
            self.seconds, self.first_step = earlier["hours"] * 3600, earlier["hours_since_step"]

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.seconds += time.monotonic() - self._start
            facts = training_facts(self.trainer, self.seconds, self.first_step)
            try:
                write_facts(facts, Path(args.output_dir))
            # The other ranks wait, and the drafter is worth more than what is told of it.
            except OSError as error:
                logger.warning(f"{FACTS_NAME} could not be written into {args.output_dir}: {error}")


def write_facts(facts: dict[str, Any], folder: Path) -> None:
    """Write a run's facts; a kill leaves the old file or the new one, never a half."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{FACTS_NAME}.part"
    aside.write_text(json.dumps(facts, indent=1) + "\n")
    aside.replace(folder / FACTS_NAME)


def read_facts(folder: str | Path) -> dict[str, Any] | None:
    """What a run wrote about itself, or None where it wrote nothing that can be read."""
    path = Path(folder) / FACTS_NAME
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        logger.warning(f"{path} is not what a run wrote about itself, so nothing is told of the training.")
        return None
    return facts


__all__ = [
    "FORMAT",
    "TrainingFacts",
    "differing_arguments",
    "hub_id",
    "read_facts",
    "training_facts",
    "write_facts",
]
