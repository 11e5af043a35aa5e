# SPDX-License-Identifier: Apache-2.0
"""From a trained drafter to a repository of the Hub: a run's facts, its results, its card, one commit.

A run writes what it knows of itself as `training.json` beside the drafter; `recipes/evaluate_acceptance.py` and the
demo write what they measured as `results.json`. The card tells both. No local path and no secret is ever published.
"""

import json
import math
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
import yaml
from datasets import Dataset
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import TrainerCallback
from transformers.trainer_utils import HubStrategy
from transformers.utils import hf_api, logging
from transformers.utils.hub import PushInProgress
from transformers.utils.quantization_config import QuantizationMethod

from .acceptance import plot_label
from .adapting import is_adapter, plain_drafter
from .callbacks import first_nonfinite_parameter
from .chats import describe
from .checkpoint_files import WEIGHT_DTYPES, is_adapter_folder
from .checkpointing import STAGING_PREFIX
from .modeling_dflash import DFlashDraftModel
from .packing import PackedDataset
from .training_args import LEARNING_ARGUMENTS, DFlashTrainingArguments
from .validation import Checkpoint, ValidationReport, read_folder, serving_commands, validate_checkpoint
from .writing import linked_copy


logger = logging.get_logger(__name__)

FACTS_NAME = "training.json"
RESULTS_NAME = "results.json"
PLOT_NAME = "acceptance.png"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".svg", ".webp", ".gif")

FORMAT = 1
# Arguments that decide what a drafter becomes; the others say where it runs and what is written.
RECIPE_ARGUMENTS = (
    *(name for name in LEARNING_ARGUMENTS if name != "ignore_data_skip"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "row_length", "max_length", "enable_thinking"),
    *("trainable_modules", "ddp_bf16_compression", "seed", "data_seed"),
)

_REPO_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")


def hub_id(name: Any) -> str | None:
    """What a model was loaded from if it is a repository's id, else None."""
    text = str(name or "")
    return text if _REPO_ID.fullmatch(text) and not Path(text).exists() else None


def differing_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of `DFlashTrainingArguments.to_dict()` that belong to a recipe and are not the defaults."""
    defaults = {field.name: field.default for field in fields(DFlashTrainingArguments)}
    given = {name: arguments[name] for name in RECIPE_ARGUMENTS if name in arguments}
    # A folder among the target's arguments would be a local path.
    given = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in given.items()}
    return {k: v for k, v in given.items() if v not in (defaults.get(k), None, {}) and k != "target_model_init_kwargs"}


def training_facts(trainer: Any, seconds: float, first_step: int) -> dict[str, Any]:
    """What a card says of a run that has trained for so many seconds since its `first_step`, as JSON values."""
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
    documents, lengths, manifest = rows.documents, np.asarray(rows._lengths), None
    description = documents.info.description if isinstance(documents, Dataset) else ""
    if (description or "").startswith("{"):
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
    """Times a trainer's run and writes `training.json` at its end."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
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
            write_facts(training_facts(self.trainer, self.seconds, self.first_step), Path(args.output_dir))
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


@dataclass(frozen=True)
class CardResults:
    """A card's table and the sentence that says how it was measured."""

    rows: tuple[ResultRow, ...]
    settings: str


def load_results(path: Path, drafter: str | None = None) -> dict[str, Any]:
    """The content of a `results.json` that [`read_results`] understands.

    Raises:
        ValueError: It is something else, and why.
        OSError: It cannot be read.
    """
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
    """The rows of a card.

    Args:
        results: What `recipes/evaluate_acceptance.py` or `recipes/smollm2-135m/demo.py` wrote as `results.json`.
        drafter: Which drafter of it, where there are several: its name there.

    Raises:
        ValueError: It is something else, was interrupted, measured nothing, or holds several drafters and none was
            named.
    """
    try:
        return _read_evaluation(results, drafter) if "drafters" in results else _read_demo(results)
    # Any JSON may be in a file of that name.
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"The results have another form than those of our recipes ({error!r}).") from error


def _read_demo(results: dict[str, Any]) -> CardResults:
    groups = {name: value["after"] for name, value in results.items() if isinstance(value, dict) and "after" in value}
    if not groups:
        raise ValueError(
            f"The results hold {sorted(results)}; expected results.json of recipes/evaluate_acceptance.py, measured "
            "by decoding here and not on a server, or of recipes/smollm2-135m/demo.py."
        )
    names = {"seen": "chats it was trained on", "unseen": "chats it never saw"}
    rows = [
        _row(names.get(name, name), report, results[name].get("after_interval")) for name, report in groups.items()
    ]
    tokens = sorted({report["max_new_tokens"] for report in groups.values()})
    span = " to ".join(str(number) for number in dict.fromkeys((tokens[0], tokens[-1])))
    return CardResults(tuple(rows), f"Greedy decoding, {span} new tokens per prompt at most.")


def _read_evaluation(results: dict[str, Any], drafter: str | None) -> CardResults:
    reports, settings = results["drafters"], results["settings"]
    if not results.get("finished", True):
        raise ValueError(
            "The evaluation was interrupted, so its results are of a part of the prompts. Run "
            "recipes/evaluate_acceptance.py to its end before publishing them."
        )
    if drafter is None and len(reports) == 1:
        drafter = next(iter(reports))
    if drafter not in reports:
        raise ValueError(f"The results are of the drafters {sorted(reports)}, not of {drafter}. Name one of them.")
    report = reports[drafter]
    sources = report.get("by_source") or {}
    # Of some prompts every answer may have ended with its first token.
    measured = {source: part for source, part in sources.items() if part["acceptance_length"] is not None}
    rows = [_row(source, part, None) for source, part in measured.items()] if len(sources) > 1 else []
    rows.append(_row(next(iter(sources)) if len(sources) == 1 else "all", report, report.get("interval")))
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


def _row(prompts: str, report: dict[str, Any], interval: Any) -> ResultRow:
    length = report["acceptance_length"]
    if length is None or not math.isfinite(length):
        raise ValueError(f"The results have no acceptance length for {prompts}: no answer was longer than one token.")
    low, high = interval or (None, None)
    number = report["num_prompts"] if "num_prompts" in report else len(report["prompts"])
    slots = tuple(share for share in report.get("slot_acceptance", []) if share is not None)
    return ResultRow(prompts, number, length, low, high, report.get("speed_up"), slots)


def plot_results(results: CardResults, path: Path) -> None:
    """The acceptance lengths with their intervals, and the share of blocks that accept the draft of each slot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in results.rows if row.slots]
    figure = Figure(figsize=(10 if shown else 6, 1.5 + max(2.5, 0.4 * len(results.rows))), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, *others = figure.subplots(1, 2 if shown else 1, squeeze=False)[0]
    for slots in others:
        for row in shown:
            slots.plot(range(1, len(row.slots) + 1), row.slots, marker=".", label=plot_label(row.prompts))
        slots.set(xlabel="drafted slot", ylabel="share of blocks that accept it", ylim=(0, 1))
        slots.set(title="acceptance per slot", xticks=range(1, max(len(row.slots) for row in shown) + 1))
        slots.legend()
    names = [plot_label(row.prompts) for row in results.rows]
    values = [row.acceptance_length for row in results.rows]
    below = [0 if row.low is None else max(0.0, row.acceptance_length - row.low) for row in results.rows]
    above = [0 if row.high is None else max(0.0, row.high - row.acceptance_length) for row in results.rows]
    lengths.barh(names, values, xerr=[below, above], capsize=4)
    lengths.invert_yaxis()
    lengths.axvline(1, color="gray", linewidth=1)
    lengths.set(xlabel="tokens per forward of the target", xlim=(0, None), title="acceptance length")
    figure.savefig(path, dpi=120)


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


def _acceptance(results: CardResults | None, options: CardOptions, block_size: int | None) -> str:
    """Table, plots and settings of what was measured."""
    parts = ["**Not yet run.**" if options.planned else "**Not yet measured.**"]
    if results is not None:
        timed = any(row.speed_up is not None for row in results.rows)
        lines = [["prompts", "number", "acceptance length", "95% interval", *(["speed-up"] if timed else [])]]
        for row in results.rows:
            interval = "-" if row.low is None or row.high is None else f"{row.low:.2f} to {row.high:.2f}"
            cells = [row.prompts, str(row.number), f"{row.acceptance_length:.2f}", interval]
            lines.append([*cells, *(["-" if row.speed_up is None else f"{row.speed_up:.2f}"] if timed else [])])
        parts = [
            "Acceptance length: tokens committed per verification forward of the target (accepted drafts and the "
            f"target's own next token), of at most {block_size}; 1 is what the target does alone.",
            _table(lines),
            results.settings,
        ]
    if options.results_command:
        measured = "Measured by" if results else "It will be measured by"
        parts.append(f"{measured}\n\n{_code('bash', options.results_command)}")
    return "\n\n".join([*parts, *(f"![{Path(plot).stem}]({quote(plot)})" for plot in options.plots)])


def _in_python(serving: dict[str, str], repo_id: str, target: str, hybrid: bool) -> str:
    """Programs that decode with the drafter; for a hybrid target the one function that does."""
    if hybrid:
        return (
            "The target has recurrent layers: transformers' `generate` refuses it, and z-lab's package changes its "
            "text. `dflash_hf.generation.speculative_generate` decodes with it."
        )
    parts = [
        "With transformers and dflash_hf (without it, "
        f'`AutoModel.from_pretrained("{repo_id}", trust_remote_code=True)` loads the drafter):',
        _code("python", python_example(serving["transformers"], target)),
        "With z-lab's package (`pip install dflash`):",
        _code("python", python_example(serving["z-lab"], target)),
    ]
    return "\n\n".join(parts)


def _training(facts: dict[str, Any], options: CardOptions) -> str:
    """What the run recorded, its recipe and the command that repeats it."""
    parts = []
    if "steps" in facts:
        parts.append(_table([("", ""), *_training_rows(facts, options.base_model)]))
    elif not options.train_command and not facts.get("recipe"):
        parts.append("No record of the run is at hand.")
    if recipe := dict(facts.get("recipe") or {}):
        if "max_steps" in recipe:
            # It overrides the epochs.
            recipe.pop("num_train_epochs", None)
        text = yaml.safe_dump(recipe, sort_keys=True).strip()
        parts += ["Where the recipe differs from the defaults of `DFlashTrainingArguments`:", _code("yaml", text)]
    if options.train_command:
        parts += [f"{'Not yet run' if options.planned else 'The command'}:", _code("bash", options.train_command)]
    return "\n\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = rows
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *others))


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def python_example(snippet: str, target: str) -> str:
    """A snippet of [`validation.serving_commands`] (imports first, loads both models, decodes) as a whole program."""
    # As formatters write it.
    snippet = re.sub(r"\(\n\s+(.*)\n\)", r"(\1)", snippet.replace("'", '"'))
    first, *rest = snippet.splitlines()
    code = [_PREAMBLE + first.split("  #")[0], "", _PROMPT.format(target=json.dumps(target)).rstrip(), "", *rest]
    return "\n".join([*code, "print(tokenizer.decode(output_ids[0, input_ids.shape[1] :], skip_special_tokens=True))"])


def _sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """Fields of the template that say how large the drafter is."""
    headers, kinds = checkpoint.headers or {}, checkpoint.value("layer_types") or []
    number = sum(prod(shape) for _, shape in headers.values())
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    parts = [f"{len(kinds) - sliding} with full attention"] if len(kinds) > sliding else []
    parts += [f"{sliding} with a window of {checkpoint.value('sliding_window')} tokens"] if sliding else []
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
        taken = f"{data['documents']:,}, taken for the target's own answers; digest `{data['digest'][:12]}`{of}"
        rows += [
            ("documents", taken),
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


def _limits(facts: dict[str, Any], checkpoint: Checkpoint, options: CardOptions) -> str:
    """What was not trained or not measured, and what the publisher adds to that."""
    recipe, data, target = facts.get("recipe") or {}, facts.get("data"), facts.get("target") or {}
    # Documents that were tokenised before have their own, which a recipe cannot change.
    tokenised = (data or {}).get("manifest") or {}
    thinking = tokenised.get("thinking", recipe.get("enable_thinking"))
    is_known = bool(facts) and (thinking is not None or not tokenised or "thinking" in tokenised)
    mode = f"{THINKING[thinking]}; expect fewer accepted drafts otherwise." if is_known else "not recorded."
    beside = "Beside quantised or fine-tuned weights of the target it was not measured; expect fewer accepted drafts."
    if target.get("quantised"):
        beside = (
            f"Trained beside the target quantised as {target['quantised']}; expect fewer accepted drafts beside "
            "other weights."
        )
    length = f"Trained on texts of up to {data['longest_document']:,} tokens; " if data else ""
    sentences = [
        f"It drafts what the target writes in the way of its training data. Thinking in that data: {mode}",
        "Languages and domains that the training data lacks were not measured.",
        *([f"{length}acceptance beyond that was not measured."] if data else []),
        beside,
        "Quantising the drafter itself to 8 or fewer bits was not measured; it changes speed and acceptance, never "
        "the text.",
        f"Blocks longer than {checkpoint.block_size} were not trained; shorter ones can be set where it is served.",
    ]
    return "\n".join(f"- {sentence}" for sentence in [*sentences, *options.limits])


def _licence(license: str | None, adapted_from: str | None) -> str:
    """Whose licence holds for what."""
    stated = "The publisher has not stated one" if license is None else f"`{license}`"
    base = f" That of {adapted_from} applies to the weights that it was adapted from." if adapted_from else ""
    return f"{stated}. The licence of the target applies to its outputs, on which the drafter was trained.{base}"


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
        checkpoint: The drafter under the name of its repository, as [`validation.read_folder`] reads it.
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
    serving = serving_commands(replace(checkpoint, base_model=target))
    model_type = (facts.get("target") or {}).get("model_type")
    origin = _card_origin(facts, adapted_from)
    text = _sizes(checkpoint) | {
        "name": checkpoint.name.split("/")[-1],
        "planned": options.planned,
        "repo_id": checkpoint.name,
        "target": f"[{target}](https://huggingface.co/{target})" if target else "a target that this card cannot name",
        "target_id": target,
        "target_was_local": bool(facts.get("target")),
        "adapted_from": origin,
        "acceptance": _acceptance(results, options, checkpoint.block_size),
        "serving": serving,
        "in_python": _in_python(serving, checkpoint.name, target or "TARGET", model_type in HYBRID_TYPES),
        "training": _training(facts, options),
        "limits": _limits(facts, checkpoint, options),
        "licence_text": _licence(options.license, adapted_from or (origin and "the first drafter")),
    }
    data = _metadata(checkpoint.name, target, results, options)
    return ModelCard.from_template(data, template_path=str(TEMPLATE), **text)


def _card_origin(facts: dict[str, Any], adapted_from: str | None) -> str | None:
    """The drafter that this one was adapted from, as text; None for one that was trained from nothing."""
    if adapted_from:
        return f"[{adapted_from}](https://huggingface.co/{adapted_from})"
    return "a drafter that this card cannot name" if facts.get("is_continued") or facts.get("adapter") else None


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
        )
        for row in (results.rows if results else ())
    ]
    # The Hub knows finetune, adapter, merge and quantized; a drafter adds weights to a base that stays as it is.
    extra: dict[str, Any] = {"base_model_relation": "adapter"} if target else {}
    return ModelCardData(
        base_model=target,
        language=list(options.languages) or None,
        library_name="transformers",
        license=options.license,
        pipeline_tag="text-generation",
        tags=list(TAGS),
        model_name=repo_id.split("/")[-1] if evaluations else None,
        eval_results=evaluations or None,
        **extra,
    )


@dataclass(frozen=True)
class Publication:
    """A folder with all files of the repository `repo_id`, and what the validator says of it."""

    folder: Path
    repo_id: str
    report: ValidationReport

    @property
    def files(self) -> dict[str, int]:
        """Size in bytes of each file, by its path in the repository."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in paths}

    def __str__(self) -> str:
        files = self.files
        width = max(len(name) for name in files)
        lines = [f"{name:<{width}}  {_size(size):>9}" for name, size in files.items()]
        return "\n".join([f"{self.repo_id}:", *lines, f"{'in all':<{width}}  {_size(sum(files.values())):>9}"])


def build_repository(
    drafter: DFlashDraftModel,
    folder: str | Path,
    repo_id: str,
    *,
    facts: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
    results_drafter: str | None = None,
    plots: Iterable[str | Path] = (),
    options: CardOptions | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    fp32: bool = False,
) -> Publication:
    """Write all files of a repository, without any network.

    Args:
        drafter: The drafter; it is not changed.
        folder: To write to, empty or new.
        repo_id: "OWNER/NAME" of the repository.
        facts: `training.json` of the run.
        results: `results.json` of `recipes/evaluate_acceptance.py` or the demo.
        results_drafter: Which drafter of it, where it has several.
        plots: Further images.
        options: What the publisher adds to the card.
        dtype: Type of the weights.
        fp32: Whether to add the weights as they were trained, in the folder `fp32`.

    Raises:
        ValueError: `repo_id` is no full name, the folder holds something, a plot has the name of another file, or a
            reader would not load the drafter.
    """
    folder, options, images = Path(folder), options or CardOptions(), [Path(plot) for plot in plots]
    check_repo_id(repo_id)
    _check_plots(images, taken=() if results is None else (PLOT_NAME,))
    if parameter := first_nonfinite_parameter(drafter):
        raise ValueError(
            f"{repo_id} is not sent: the drafter's {parameter} holds NaN or infinity, so it drafts nothing. Take an "
            "earlier checkpoint."
        )
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty, and all that is in it would be published. Give a new folder.")
    card_results = None if results is None else read_results(results, results_drafter)
    try:
        drafter.save_pretrained(folder, dtype=dtype)
        if fp32:
            drafter.save_pretrained(folder / "fp32", dtype=torch.float32)
        for image in images:
            shutil.copy(image, folder / image.name)
        report = _write_texts(folder, repo_id, facts, results, card_results, [i.name for i in images], options)
    except BaseException:
        # The same command must find the folder as it was.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Publication(folder, repo_id, report)


def _write_texts(
    folder: Path,
    repo_id: str,
    facts: dict[str, Any] | None,
    results: dict[str, Any] | None,
    card_results: CardResults | None,
    names: list[str],
    options: CardOptions,
) -> ValidationReport:
    """Write results, plot and card beside the drafter, and check the whole."""
    if card_results is not None:
        (folder / RESULTS_NAME).write_text(json.dumps(without_local_paths(results), indent=1) + "\n")
        if find_spec("matplotlib") is not None:
            plot_results(card_results, folder / PLOT_NAME)
            names = [PLOT_NAME, *names]
        else:
            logger.warning("The card has no plot of the acceptance: pip install matplotlib.")
    model_card(read_folder(folder, repo_id), facts, card_results, replace(options, plots=names)).save(
        folder / "README.md"
    )
    report = validate_checkpoint(folder)
    if not report.ok:
        raise ValueError(f"{repo_id} is not sent, since not every reader would load it as it was trained.\n{report}")
    return report


def _check_plots(images: list[Path], taken: tuple[str, ...]) -> None:
    """Refuse images that would take the place of each other, or of another file of the repository."""
    names = [*taken, *(image.name for image in images)]
    for image in images:
        if image.suffix.lower() not in IMAGE_SUFFIXES or names.count(image.name) > 1:
            raise ValueError(
                f"The plot {image} cannot be published: expected an image ({', '.join(IMAGE_SUFFIXES)}) whose name no "
                f"other has ({PLOT_NAME} is made of the results). Rename it."
            )


def check_repo_id(repo_id: str) -> None:
    """Raise a ValueError for what is not "OWNER/NAME"."""
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"repo_id={repo_id!r} is no name of a repository: {error}") from None
    if "/" not in repo_id:
        raise ValueError(
            f"repo_id={repo_id!r} has no owner: the card's commands name the whole repository. Give OWNER/{repo_id}."
        )


def without_local_paths(value: Any) -> Any:
    """JSON values in which every local path, in keys too, is cut to its last part."""
    if isinstance(value, dict):
        cut: dict[Any, Any] = {}
        for key, item in value.items():
            name = short = without_local_paths(key)
            # Drafters in folders of one name stay apart.
            while name in cut:
                name = f"{short} ({2 if name == short else int(name.rsplit('(', 1)[1][:-1]) + 1})"
            cut[name] = without_local_paths(item)
        return cut
    if isinstance(value, list):
        return [without_local_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and _is_local_path(value) else value


def _is_local_path(text: str) -> bool:
    # Answers are texts too; a path has no blanks or line ends worth keeping and is short.
    if "/" not in text or len(text) > 1024 or "\n" in text:
        return False
    return text.startswith(("/", "./", "../", "~")) or Path(text).exists()


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} GB"


# Weights of an earlier drafter, which would stay beside the new ones.
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


class PublishError(RuntimeError):
    """The repository could not be sent; what is here and what others see of it are as they were."""


def publish(
    publication: Publication,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload drafter",
    tag: str | None = None,
    token: str | bool | None = None,
    keep_card: bool = False,
) -> str:
    """Send a repository in one commit.

    Args:
        publication: What [`publishing.build_repository`] wrote.
        private: Whether a new repository is private; by default as the owner's settings say. A repository that is
            there already must be as asked.
        revision: Branch, made where it is missing; main by default.
        commit_message: First line of the commit.
        tag: Tag of the commit, which must be new.
        token: Access token; by default the environment's or the stored one.
        keep_card: Leave the card of a repository that has one as it is.

    Returns:
        Address of the commit.

    Raises:
        PublishError: Saying what is wrong and what to do.
    """
    repo_id = publication.repo_id
    check_repo_id(repo_id)
    api = HfApi(token=token)
    with _explained(repo_id, "asking who the token is of"):
        user = api.whoami()["name"]
    with _explained(repo_id, f"preparing it as {user}"):
        present = _prepare(api, repo_id, private, revision or "main", tag)
    kept = {"README.md"} & present if keep_card else set()
    names = [name for name in publication.files if name not in kept]
    operations: list = [CommitOperationAdd(name, str(publication.folder / name)) for name in names]
    stale = [n for n in sorted(present - set(names)) if "/" not in n and any(fnmatch(n, p) for p in WEIGHT_FILES)]
    operations += [CommitOperationDelete(name) for name in stale]
    with _explained(repo_id, "sending the files"):
        commit = api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
    if tag is not None:
        with _explained(repo_id, f"tagging the commit {commit.oid}, which is there,"):
            api.create_tag(repo_id, tag=tag, revision=commit.oid)
    return str(commit.commit_url)


def push_drafter(
    drafter: DFlashDraftModel,
    repo_id: str,
    dtype: torch.dtype | None = torch.bfloat16,
    *,
    facts: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
    options: CardOptions | None = None,
    **kwargs: Any,
) -> str:
    """Build a drafter's repository and send it, with what its folder knows of its training and measuring.

    Args:
        drafter: The drafter.
        repo_id: "OWNER/NAME".
        dtype: Type of the weights.
        facts: As for [`build_repository`]; by default `training.json` of the folder it was loaded from, unless it has
            been trained since.
        results: The same; by default `results.json` of that folder.
        options: As for [`build_repository`].
        **kwargs: Further arguments of [`publish`].

    Returns:
        Address of the commit.

    Raises:
        PublishError: It could not be sent.
        ValueError: A reader would not load it.
    """
    folder = Path(drafter.config.name_or_path or "")
    if drafter.config.name_or_path and folder.is_dir() and _is_of(drafter, folder):
        facts = read_facts(folder) if facts is None else facts
        results = recorded_results(folder) if results is None else results
    told: dict[str, Any] = {"facts": facts, "results": results, "options": options}
    with tempfile.TemporaryDirectory() as temporary:
        return publish(build_repository(drafter, temporary, repo_id, dtype=dtype, **told), **kwargs)


def _is_of(drafter: DFlashDraftModel, folder: Path) -> bool:
    """Whether a drafter still is what its folder tells of; one that was trained since is another."""
    # Of an adapter's folder a drafter is merged, and cannot be read again as it is.
    if is_adapter_folder(folder):
        return True
    try:
        stored = DFlashDraftModel.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    except (ValueError, OSError) as error:
        logger.warning(f"{folder} holds no drafter any more, so the card tells nothing of its training: {error}")
        return False
    own = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    if own.keys() == stored.keys() and all(torch.equal(tensor, stored[name]) for name, tensor in own.items()):
        return True
    logger.warning(
        f"The drafter was loaded from {folder} and has other weights by now, so the card tells neither the training "
        "nor the results that are recorded there. Push it by its trainer, or save it and publish its folder."
    )
    return False


def full_repo_id(name: str, token: str | bool | None = None) -> str:
    """ "OWNER/NAME" of a name that may lack the owner, which is then the token's."""
    if "/" in name:
        return name
    with _explained(name, "asking who the token is of"):
        return f"{HfApi(token=token).whoami()['name']}/{name}"


def _prepare(api: HfApi, repo_id: str, private: bool | None, branch: str, tag: str | None) -> set[str]:
    """Make the repository and its branch where they are missing; the names of the files that are on the branch."""
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError:
        # Another one's private repository looks the same; making it then says that the name is taken.
        api.create_repo(repo_id, private=private)
        info = api.model_info(repo_id)
    if private is not None and bool(info.private) != private:
        there, asked = ("private", "public") if info.private else ("public", "private")
        raise PublishError(
            f"{repo_id} is there and {there}, and private={private} was asked: a push does not make it {asked}. "
            "Change it in its settings, or leave private out."
        )
    refs = api.list_repo_refs(repo_id)
    if tag is not None and tag in [ref.name for ref in refs.tags]:
        raise PublishError(f"{repo_id} has a tag {tag} already, which others may rely on. Give another tag.")
    branches = [ref.name for ref in refs.branches]
    source = branch if branch in branches else "main"
    present = set(api.list_repo_files(repo_id, revision=source)) if source in branches else set()
    _refuse_other_model(api, repo_id, source, present)
    if branch != "main" and branch not in branches:
        api.create_branch(repo_id, branch=branch)
    return present


def _refuse_other_model(api: HfApi, repo_id: str, revision: str, present: set[str]) -> None:
    if "config.json" in present:
        config = json.loads(Path(api.hf_hub_download(repo_id, "config.json", revision=revision)).read_text())
        architectures = config.get("architectures") or []
        if "dflash_config" in config or "DFlashDraftModel" in architectures:
            return
        holds = f"a {' or '.join(architectures) or config.get('model_type', 'model')}"
    elif any(fnmatch(name, pattern) for name in present for pattern in WEIGHT_FILES):
        holds = "weights of something else"
    else:
        return
    raise PublishError(f"The name {repo_id} is taken: the repository holds {holds}, no drafter. Give another name.")


@contextmanager
def _explained(repo_id: str, doing: str) -> Iterator[None]:
    """Errors of the network as one that says what to do."""
    try:
        yield
    except PublishError:
        raise
    except LocalTokenNotFoundError:
        raise PublishError(
            f"{repo_id} was not sent: no access token. Set HF_TOKEN, or log in with `hf auth login`."
        ) from None
    # An upload in a thread, and one by Xet, end in a RuntimeError around what happened.
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
        raise PublishError(f"{repo_id} was not sent ({doing}): {_advice(repo_id, cause)}") from error


def _advice(repo_id: str, error: BaseException) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    known = {
        401: "the Hub does not accept the access token. Make one with write permission, and set HF_TOKEN or log in "
        "with `hf auth login`.",
        403: f"the access token may not write to {repo_id}. Give it write permission for {repo_id.split('/')[0]}, or "
        "give a repo_id of your own.",
        409: f"the name {repo_id} is taken by a repository that this token cannot see. Give another name.",
    }
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return known.get(status or 0) or (
        f"{text}. Others see all files of a commit or none, and nothing here has changed. Run the same again: what "
        "has arrived is not sent a second time."
    )


def write_publishable(trainer: Any, folder: Path) -> None:
    """Write what users of a drafter load: bf16 weights in the published layout, its code and the tokenizer."""
    drafter = plain_drafter(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
    drafter.save_pretrained(folder, dtype=torch.bfloat16)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)


def push_checkpoint(trainer: Any, checkpoint: Path) -> None:
    """Push the present drafter, and the checkpoint where `hub_strategy` says so, in the background.

    Both are pushed from folders of their own, which stay until then: later steps change neither, and a checkpoint may
    be rotated away meanwhile.
    """
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    running: PushInProgress | None = trainer.push_in_progress
    if running is not None and not running.is_done() and not args.hub_always_push:
        logger.warning(f"{checkpoint.name} is not pushed to the Hub: the push before it is still going on.")
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    message = f"Training in progress, step {trainer.state.global_step}"
    staging = Path(args.output_dir) / f"{STAGING_PREFIX}{trainer.state.global_step}"
    copy = staging.with_name(f"{staging.name}-checkpoint")
    with_checkpoint = args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
    try:
        write_publishable(trainer, staging)
        if with_checkpoint:
            linked_copy(checkpoint, copy)
    # Tokenizers raise bare exceptions. Other ranks would wait for one that stops here, and the checkpoint is there.
    except Exception as error:
        logger.warning(f"{checkpoint.name} cannot be set aside to be pushed to the Hub ({error}).")
        for folder in (staging, copy):
            shutil.rmtree(folder, ignore_errors=True)
        return
    jobs = [_upload(trainer, staging, message, staging)]
    if with_checkpoint:
        last = args.hub_strategy == HubStrategy.CHECKPOINT
        name = "last-checkpoint" if last else checkpoint.name
        jobs.append(_upload(trainer, copy, f"{message}, checkpoint", copy, path_in_repo=name))
    before = [] if running is None or running.is_done() else running.jobs
    trainer.push_in_progress = PushInProgress([*before, *jobs])  # type: ignore[arg-type, misc]


def build_publication(trainer: Any, folder: Path, repo_id: str, options: CardOptions | None = None) -> Publication:
    """The repository of a trainer's present drafter, with what the run and its output folder know."""
    output = Path(trainer.args.output_dir)
    drafter = plain_drafter(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
    plots = [path for path in sorted(output.glob("*.png")) if path.name != PLOT_NAME]
    facts, results = read_facts(output), recorded_results(output)
    return build_repository(drafter, folder, repo_id, facts=facts, results=results, plots=plots, options=options)


def write_card(trainer: Any, options: CardOptions | None = None) -> None:
    """Write the card of a trainer's present drafter into the output folder; needs no network."""
    output = Path(trainer.args.output_dir)
    name = trainer.hub_model_id or output.absolute().name
    with tempfile.TemporaryDirectory() as folder:
        build_publication(trainer, Path(folder), name if "/" in name else f"OWNER/{name}", options)
        shutil.copy(Path(folder, "README.md"), output)


def push_run(
    trainer: Any,
    commit_message: str,
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    tag: str | None = None,
    options: CardOptions | None = None,
) -> str | Future | None:
    """Publish the present drafter of a run.

    Args:
        trainer: The run, whose arguments say what is not given.
        commit_message, token, revision, private, tag: As for [`publish`].
        blocking: Whether to wait until all is sent.
        options: What the publisher adds to the card.

    Returns:
        Address of the commit, or a future of it; None on all ranks but the first.
    """
    args = trainer.args
    if not trainer.is_world_process_zero():
        return None
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    trainer._finish_current_push()
    sending = {
        "token": token or args.hub_token,
        "revision": revision or args.hub_revision,
        "private": args.hub_private_repo if private is None else private,
        "tag": tag,
    }
    name = trainer.hub_model_id or args.hub_model_id or Path(args.output_dir).absolute().name
    trainer.hub_model_id = repo_id = full_repo_id(name, token or args.hub_token)
    staging = Path(args.output_dir) / f"{STAGING_PREFIX}final"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        publication = build_publication(trainer, staging, repo_id, options)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise

    def send() -> str:
        try:
            return publish(publication, commit_message=commit_message, **sending)  # type: ignore[arg-type]
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    if blocking:
        return send()
    future = hf_api().run_as_future(send)
    future.add_done_callback(_tell_failure)
    trainer.push_in_progress = PushInProgress([future])  # type: ignore[arg-type, misc]
    return future


def _tell_failure(finished: Future) -> None:
    error = None if finished.cancelled() else finished.exception()
    if error is not None:
        logger.warning(str(error))


def _upload(trainer: Any, folder: Path, message: str, temporary: Path, path_in_repo: str | None = None) -> Future:
    future = hf_api().upload_folder(
        repo_id=trainer.hub_model_id,
        folder_path=str(folder),
        path_in_repo=path_in_repo,
        commit_message=message,
        token=trainer.args.hub_token,
        revision=trainer.args.hub_revision,
        # Files of an older checkpoint that this one does not have, such as the states of more ranks.
        delete_patterns="*" if path_in_repo == "last-checkpoint" else None,
        # A pickle that nothing reads.
        ignore_patterns=["training_args.bin"],
        run_as_future=True,
    )

    # Who waits for an upload hears of its end before callbacks run; this one ends once its folder is gone.
    settled: Future = Future()

    def done(finished: Future) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        error = None if finished.cancelled() else finished.exception()
        if error is not None:
            logger.warning(f"'{message}' did not arrive at {trainer.hub_model_id}: {describe(error)}")
        settled.set_result(None)

    future.add_done_callback(done)
    return settled


# The drafter's file is published as remote code, so it cannot import this one.
DFlashDraftModel.publisher = push_drafter
