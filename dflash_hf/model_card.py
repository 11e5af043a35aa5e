# SPDX-License-Identifier: Apache-2.0
"""What is told of a drafter: the facts of its run, the results of its measurement, and the card that holds both.

A run writes its facts as `training.json` beside the drafter; `dflash-hf evaluate` and the demo write `results.json`.
`model_card_template.md` has the words of the card. No local path comes into it.
"""

import json
import math
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from datasets import Dataset
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import TrainerCallback
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationMethod

from .acceptance import interval, new_figure, number, plot_label, plot_slots, table
from .adapting import is_adapter
from .checkpoint_format import WEIGHT_DTYPES
from .packing import PackedDataset
from .training_args import LEARNING_ARGUMENTS, DFlashTrainingArguments
from .validation import Checkpoint, serving_commands
from .writing import replace_file


logger = logging.get_logger(__name__)

FACTS_NAME = "training.json"
RESULTS_NAME = "results.json"
FORMAT = 1
# Arguments that decide what a drafter becomes; the others say where it runs and what is written.
RECIPE_ARGUMENTS = (
    *(name for name in LEARNING_ARGUMENTS if name != "ignore_data_skip"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "row_length", "max_length", "enable_thinking"),
    *("trainable_modules", "ddp_bf16_compression", "seed", "data_seed"),
)
TEMPLATE = Path(__file__).with_name("model_card_template.md")
# A clock compares nothing on fewer.
FEW_PROMPTS = 10
TAGS = ("dflash", "speculative-decoding", "draft-model")
# Recurrent targets, whose state speculative decoding has to roll back.
HYBRID_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
THINKING = {
    None: "the chat template's own default",
    True: "thinking on",
    False: "thinking off",
    "inferred": "on where an answer holds some, else off",
    "mixed": "of several modes",
}
PROGRAM = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
{imports}

tokenizer = AutoTokenizer.from_pretrained({target})
messages = [{{"role": "user", "content": "What is the capital of France?"}}]
inputs = tokenizer.apply_chat_template(
    messages,
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)
input_ids = inputs["input_ids"]

{body}
print(tokenizer.decode(output_ids[0, input_ids.shape[1] :], skip_special_tokens=True))"""

# Of a licence or a language.
_CODE = re.compile(r"[a-z][a-z0-9.-]*(?:-[A-Z][A-Za-z]+)?")
_REPO_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")


# --- The facts of a run.


def hub_id(name: Any) -> str | None:
    """What a model was loaded from if it is a repository's id, else None."""
    text = str(name or "")
    return text if _REPO_ID.fullmatch(text) and not Path(text).exists() else None


def differing_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of `DFlashTrainingArguments.to_dict()` that belong to a recipe and are not the defaults."""
    # Without a record to take one from, no objective is cross-entropy.
    defaults = {field.name: field.default for field in fields(DFlashTrainingArguments)} | {
        "objective": "cross_entropy"
    }
    given = {name: arguments[name] for name in RECIPE_ARGUMENTS if name in arguments}
    given = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in given.items()}
    # A folder among the target's arguments would be a local path.
    return {k: v for k, v in given.items() if v not in (defaults.get(k), None, {}) and k != "target_model_init_kwargs"}


class TrainingFacts(TrainerCallback):
    """Times a trainer's run and writes `training.json` at its end."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        # Seconds of training since that step.
        self.seconds, self.first_step, self._start = 0.0, 0, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.seconds, self.first_step, self._start = 0.0, state.global_step, time.monotonic()
        earlier = read_facts(args.output_dir) if state.global_step else None
        if earlier is not None and earlier["steps"] == state.global_step:
            self.seconds, self.first_step = earlier["hours"] * 3600, earlier["hours_since_step"]

    def on_train_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        self.seconds += time.monotonic() - self._start
        try:
            write_facts(self.facts(), Path(args.output_dir))
        # The other ranks wait, and the drafter is worth more than what is told of it.
        except OSError as error:
            logger.warning(f"{FACTS_NAME} could not be written into {args.output_dir}: {error}")

    def facts(self) -> dict[str, Any]:
        """What a card says of the run so far, as JSON values."""
        trainer, record, state = self.trainer, self.trainer.run_record, self.trainer.state
        model, rows = trainer.accelerator.unwrap_model(trainer.model), trainer.train_dataset
        adapters = model.peft_config if is_adapter(model) else {}
        first = trainer._drafter_config.name_or_path
        # What a local drafter was continued from gave its weights to this one too.
        earlier = (read_facts(first) or {}) if first else {}
        facts: dict[str, Any] = {
            "format": FORMAT,
            "target": _target(trainer.target.model, record["target"]),
            "continued_from": hub_id(first) or earlier.get("continued_from"),
            "is_continued": bool(first),
            "adapter": {k: {"r": c.to_dict().get("r"), "type": str(c.peft_type.value)} for k, c in adapters.items()},
            "recipe": differing_arguments(record["arguments"]),
            "steps": state.global_step,
            "epochs": round(float(state.epoch or 0), 3),
            "hours": self.seconds / 3600,
            "hours_since_step": self.first_step,
            "hardware": _hardware(trainer.args),
            "versions": record["versions"],
            "git_commit": record["git_commit"],
        }
        if isinstance(rows, PackedDataset):
            facts["data"] = _data(rows) | {"digest": record["data"]["digest"]}
            facts["data"]["tokens_seen"] = round(facts["data"]["tokens"] * facts["epochs"])
        return facts


def _target(model: Any, identity: dict[str, Any]) -> dict[str, Any]:
    quantised = vars(model.config).get("quantization_config")
    return {
        "id": hub_id(identity["id"]),
        "revision": identity["revision"],
        "digest": identity["digest"],
        "model_type": model.config.get_text_config(decoder=True).model_type,
        "dtype": str(model.get_input_embeddings().weight.dtype).removeprefix("torch."),
        "quantised": None if quantised is None else _quantisation(quantised),
    }


def _quantisation(config: Any) -> str:
    values = config if isinstance(config, dict) else config.to_dict()
    weights = values.get("weights") or values.get("bits")
    if weights is None:
        weights = "int8" if values.get("load_in_8bit") else "int4" if values.get("load_in_4bit") else ""
    return f"{QuantizationMethod(values['quant_method']).value} {weights}".rstrip()


def _hardware(args: DFlashTrainingArguments) -> str:
    if args.device.type != "cuda":
        return f"CPU ({platform.machine()}), {torch.get_num_threads() * args.world_size} threads"
    ranks = f", {args.world_size} ranks" if args.world_size > 1 else ""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(args.device)}{ranks}"


def _data(rows: PackedDataset) -> dict[str, Any]:
    documents, lengths, manifest = rows.documents, np.asarray(rows._lengths), None
    description = documents.info.description if isinstance(documents, Dataset) else ""
    if (description or "").startswith("{"):
        # One manifest for each folder that was concatenated.
        manifests = [json.loads(part) for part in description.split("\n\n")]
        is_mixed = len({str(part.get("thinking")) for part in manifests}) > 1
        manifest = manifests[0] | ({"thinking": "mixed"} if is_mixed else {})
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "supervised_tokens": _supervised_tokens(documents),
        "longest_document": int(lengths.max()),
        "manifest": manifest,
    }


def _supervised_tokens(documents: Any) -> int:
    if not isinstance(documents, Dataset):
        return sum(stop - start for document in documents for start, stop in document["supervised_spans"])
    total = 0
    # Arrow holds the spans of many documents in one array; a Python loop over a million of them would take minutes.
    for part in documents.select_columns(["supervised_spans"]).with_format("arrow").iter(batch_size=10_000):
        for chunk in part["supervised_spans"].chunks:
            bounds = chunk.flatten().flatten().to_numpy()
            total += int((bounds[1::2] - bounds[::2]).sum())
    return total


def write_facts(facts: dict[str, Any], folder: Path) -> None:
    """Write a run's facts; a kill leaves the old file or the new one, never a half."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / FACTS_NAME, json.dumps(facts, indent=1) + "\n")


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


# --- The results of a measurement.


@dataclass(frozen=True)
class ResultRow:
    """One line of a card's table: the acceptance length on some prompts, in tokens per forward of the target.

    `low` and `high` bound its 95% interval, `speed_up` is over plain decoding, `slots` the share of blocks that accept
    the draft of each slot, each where it is known.
    """

    prompts: str
    number: int
    acceptance_length: float
    low: float | None = None
    high: float | None = None
    speed_up: float | None = None
    slots: tuple[float, ...] = ()
    speed_up_interval: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class CardResults:
    """A card's table and the sentences that say how it was measured."""

    rows: tuple[ResultRow, ...]
    settings: str


def load_results(path: Path, drafter: str | None = None) -> dict[str, Any]:
    """The content of a `results.json`; a `ValueError` for what [`read_results`] does not understand."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        read_results(results, drafter)
    except ValueError as error:
        raise ValueError(f"{path} is not what the card reads ({error})") from error
    return results


def recorded_results(folder: Path, drafter: str | None = None) -> dict[str, Any] | None:
    """What a drafter's folder has as results in a form that a card can tell, or None."""
    path = folder / RESULTS_NAME
    try:
        return load_results(path, drafter) if path.is_file() else None
    except ValueError as error:
        logger.warning(f"The card has no results: {error}.")
        return None


def read_results(results: dict[str, Any], drafter: str | None = None) -> CardResults:
    """What a card tells of a `results.json` of `dflash-hf evaluate` or of `recipes/smollm2-135m/demo.py`.

    Where that is of several drafters, `drafter` is the name of one. A `ValueError` says what is wrong with it.
    """
    try:
        return _read_evaluation(results, drafter) if "drafters" in results else _read_demo(results)
    # Any JSON may be in a file of that name.
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the results are not those of an evaluation or of the demo: {error!r}") from error


def _read_demo(results: dict[str, Any]) -> CardResults:
    groups = {name: value for name, value in results.items() if isinstance(value, dict) and "after" in value}
    if not groups:
        raise ValueError(f"it holds {sorted(results)}; expected results.json of `dflash-hf evaluate`, not of a server")
    names = {"seen": "chats it was trained on", "unseen": "chats it never saw"}
    rows = [_row(names.get(k, k), {**v["after"], "interval": v.get("after_interval")}) for k, v in groups.items()]
    tokens = sorted({group["after"]["max_new_tokens"] for group in groups.values()})
    span = " to ".join(str(count) for count in dict.fromkeys((tokens[0], tokens[-1])))
    return CardResults(tuple(rows), f"Greedy decoding, {span} new tokens per prompt at most.")


def _read_evaluation(results: dict[str, Any], drafter: str | None) -> CardResults:
    reports, settings = results["drafters"], results["settings"]
    if not results.get("finished", True):
        raise ValueError("the evaluation was interrupted, so it is of a part of the prompts: run it to its end")
    if drafter is None and len(reports) == 1:
        drafter = next(iter(reports))
    if drafter not in reports:
        raise ValueError(f"it is of the drafters {sorted(reports)}, not of {drafter}: name one of them")
    report = reports[drafter]
    sources = report.get("by_source") or {}
    # Of some prompts every answer may have ended with its first token.
    measured = {source: part for source, part in sources.items() if part["acceptance_length"] is not None}
    rows = [_row(source, part) for source, part in measured.items()] if len(sources) > 1 else []
    rows.append(_row(next(iter(sources)) if len(sources) == 1 else "all", report))
    temperature, thinking = settings["temperature"], settings.get("enable_thinking")
    parts = [
        f"Sampling at temperature {temperature}, top-p {settings['top_p']}" if temperature else "Greedy decoding",
        f"{settings['max_new_tokens']} new tokens per prompt at most",
        f"target in {str(settings.get('target_dtype', settings['dtype'])).removeprefix('torch.')}",
        *([] if thinking is None else [f"thinking {'on' if thinking else 'off'}"]),
        *([f"on {settings['hardware']}"] if settings.get("hardware") else []),
        f"transformers {settings['versions']['transformers']}, torch {settings['versions']['torch']}",
    ]
    return CardResults(tuple(rows), f"{', '.join(parts)}.")


def _row(prompts: str, report: dict[str, Any]) -> ResultRow:
    length = report["acceptance_length"]
    if length is None or not math.isfinite(length):
        raise ValueError(f"no acceptance length was measured on {prompts}: no answer was longer than one token")
    low, high = report.get("interval") or (None, None)
    count = report["num_prompts"] if "num_prompts" in report else len(report["prompts"])
    slots = tuple(share for share in report.get("slot_acceptance", []) if share is not None)
    bounds = report.get("speed_up_interval") or (None, None)
    return ResultRow(prompts, count, length, low, high, report.get("speed_up"), slots, tuple(bounds))


def plot_results(results: CardResults, path: Path, title: str) -> None:
    """The acceptance lengths with their intervals, and the share of blocks that accept the draft of each slot."""
    rows = results.rows
    names = [f"{row.prompts} ({row.number} prompts)" for row in rows]
    slots = {name: row.slots for name, row in zip(names, rows, strict=True) if row.slots}
    figure, (lengths, *others) = new_figure(2 if slots else 1, height=1.5 + max(2.5, 0.4 * len(rows)))
    for axes in others:
        plot_slots(slots, axes)
    below = [0 if row.low is None else max(0.0, row.acceptance_length - row.low) for row in rows]
    above = [0 if row.high is None else max(0.0, row.high - row.acceptance_length) for row in rows]
    values = [row.acceptance_length for row in rows]
    lengths.barh([plot_label(name) for name in names], values, xerr=[below, above], capsize=4)
    lengths.invert_yaxis()
    lengths.axvline(1, color="gray", linewidth=1)
    lengths.set(xlabel="tokens per forward of the target", xlim=(0, None), title="acceptance length")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


# --- The card.


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
    limits: Sequence[str] = ()
    planned: bool = False


def model_card(
    checkpoint: Checkpoint,
    facts: dict[str, Any] | None = None,
    results: CardResults | None = None,
    options: CardOptions | None = None,
) -> ModelCard:
    """A card with metadata that the Hub accepts; needs no network.

    Args:
        checkpoint: The drafter under the name of its repository, as [`validation.read_folder`] reads it.
        facts: What [`TrainingFacts`] wrote about the run.
        results: What was measured.
        options: What the publisher adds; names of a local path are refused.
    """
    facts, options = facts or {}, options or CardOptions()
    target = options.base_model or (facts.get("target") or {}).get("id")
    adapted_from = options.adapted_from or facts.get("continued_from")
    for name, field in ((target, "base_model"), (adapted_from, "adapted_from")):
        if name is not None and hub_id(name) is None:
            raise ValueError(f"{field}={name!r} is not a Hub id such as OWNER/NAME. A card names no path or address.")
    if target == checkpoint.name:
        raise ValueError(f"base_model={target!r} is the drafter's own repository. Give the id of its target.")
    for code in (options.license, *options.languages):
        if code is not None and not _CODE.fullmatch(code):
            raise ValueError(f"The Hub knows no licence or language {code!r}; give codes such as apache-2.0 and en.")
    if target is None:
        logger.warning("The card does not say how to serve the drafter, since its target is unknown: give base_model.")
    text: dict[str, Any] = _sizes(checkpoint) | {
        "checkpoint": checkpoint,
        "target": target,
        "is_hybrid": (facts.get("target") or {}).get("model_type") in HYBRID_TYPES,
        "adapted_from": adapted_from,
        "facts": facts,
        "options": options,
        "results": results,
        "results_table": results and _results_table(results),
        "recipe": _recipe(facts),
        "thinking": _thinking(facts),
        "serving": serving_commands(replace(checkpoint, base_model=target)),
        "python_example": python_example,
    }
    data = _metadata(checkpoint.name, target, results, options)
    return ModelCard.from_template(data, template_path=str(TEMPLATE), **text)


def _sizes(checkpoint: Checkpoint) -> dict[str, str]:
    """What the template says about how large the drafter is."""
    headers, kinds = checkpoint.headers or {}, checkpoint.value("layer_types") or []
    parameters = sum(prod(shape) for _, shape in headers.values())
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    parts = [f"{len(kinds) - sliding} with full attention"] if len(kinds) > sliding else []
    parts += [f"{sliding} with a window of {checkpoint.value('sliding_window')} tokens"] if sliding else []
    return {
        "layer_kinds": ", ".join(parts),
        "parameters": f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M",
        "dtype": "/".join(sorted({WEIGHT_DTYPES.get(dtype, dtype) for dtype, _ in headers.values()})),
    }


def _results_table(results: CardResults) -> str:
    """The table; of few prompts a clock says nothing, and what costs time is said in words."""
    heads = ["prompts", "number", "acceptance length", "95% interval", "speed-up"]
    rows, speed_ups = [], []
    for row in results.rows:
        speed_up = row.speed_up if row.number >= FEW_PROMPTS else None
        bounds = interval(row.speed_up_interval)
        cell = number(speed_up) + ("" if speed_up is None or bounds == "-" else f" ({bounds})")
        speed_ups += [] if speed_up is None else [speed_up]
        length = number(row.acceptance_length)
        rows.append([row.prompts, str(row.number), length, interval((row.low, row.high)), cell])
    width = len(heads) if speed_ups else len(heads) - 1
    lines = [table(heads[:width], [cells[:width] for cells in rows])]
    if any(value < 1 for value in speed_ups):
        lines.append("**A speed-up below 1 means that decoding took longer with the drafter than without it.**")
    if any(row.speed_up is not None and row.number < FEW_PROMPTS for row in results.rows):
        lines.append(f"No speed-up is told of fewer than {FEW_PROMPTS} prompts, which a clock cannot compare.")
    return "\n\n".join(lines)


def _recipe(facts: dict[str, Any]) -> str | None:
    """The recipe as YAML."""
    recipe = dict(facts.get("recipe") or {})
    if "max_steps" in recipe:
        # It overrides the epochs.
        recipe.pop("num_train_epochs", None)
    return yaml.safe_dump(recipe, sort_keys=True).strip() if recipe else None


def _thinking(facts: dict[str, Any]) -> str:
    """How the answers of the training data think."""
    # Documents that were tokenised before have their own mode, which a recipe cannot change.
    tokenised = (facts.get("data") or {}).get("manifest") or {}
    thinking = tokenised.get("thinking", (facts.get("recipe") or {}).get("enable_thinking"))
    if not facts or (thinking is None and tokenised and "thinking" not in tokenised):
        return "not recorded."
    return f"{THINKING[thinking]}; expect fewer accepted drafts otherwise."


def python_example(snippet: str, target: str) -> str:
    """A snippet of [`validation.serving_commands`] (imports first, loads both models, decodes) as a whole program."""
    # As formatters write it.
    snippet = re.sub(r"\(\n\s+(.*)\n\)", r"(\1)", snippet.replace("'", '"'))
    imports, _, body = snippet.partition("\n")
    return PROGRAM.format(imports=imports.split("  #")[0], target=json.dumps(target), body=body)


def _metadata(repo_id: str, target: str | None, results: CardResults | None, options: CardOptions) -> ModelCardData:
    evaluations = [
        EvalResult(
            task_type="text-generation",
            # The metrics of one type of data set would be joined.
            dataset_type=re.sub(r"[^a-z0-9]+", "-", row.prompts.lower()).strip("-"),
            dataset_name=row.prompts,
            metric_type="acceptance_length",
            metric_name="Acceptance length",
            metric_value=round(row.acceptance_length, 3),
            metric_args={"num_prompts": row.number}
            | (
                {} if row.low is None or row.high is None else {"interval_95": [round(row.low, 3), round(row.high, 3)]}
            ),
        )
        for row in (results.rows if results else ())
    ]
    # Without a relation: the Hub knows finetune, adapter, merge and quantized, and files adapters under LoRAs.
    return ModelCardData(
        base_model=target,
        language=list(options.languages) or None,
        library_name="transformers",
        license=options.license,
        pipeline_tag="text-generation",
        tags=list(TAGS),
        model_name=repo_id.split("/")[-1] if evaluations else None,
        eval_results=evaluations or None,
    )
