# SPDX-License-Identifier: Apache-2.0
"""What makes a better drafter: many short runs of `DFlashTrainer` over hidden states that are computed once.

    python recipes/smollm2-135m/study.py --data FOLDER [--runs 'ce,dpace*'] [--field value ...]

The runs stand in study_runs.yaml. Each finished one is a line of `results.jsonl` in the output folder, and is left out
when the study is started again; `table.md` and `study.png` show all of them. README.md says how to read them.
"""

import copy
import fnmatch
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from get_target import get_smollm2
from remembering_target import RememberingTarget
from study_facts import study_facts
from study_report import BASELINE, write_report
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PrinterCallback, TrainerCallback

from dflash_hf import (
    DataCollatorForDFlash,
    DFlash2DraftModel,
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    read_completions,
    tokenize_completions,
)
from dflash_hf.acceptance import DecodingSettings, WalkSums, measure_acceptance, walk_batch, walked_acceptance_length
from dflash_hf.cli import parse_config
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.losses import compares_distributions
from dflash_hf.model_card import write_facts
from dflash_hf.modeling_dflash2 import selector_of
from dflash_hf.packing import PackedDataset


HERE = Path(__file__).resolve().parent
SPLITS = ("train", "dev_greedy")
# Tokens kept of a training document, as in the reference; rows of the walk and their blocks that share a forward.
MAX_LENGTH, DEV_ROW_LENGTH, DEV_ANCHORS = 512, 1024, 256
# Shares of the steps after which a run is walked, and seconds of a run's walks, weights and compilation on an H200.
WALKS, OTHER_SECONDS = (1 / 8, 1 / 4, 1 / 2, 1), 20.0
# Processes that collate on a machine with a GPU, whose steps are faster than one of them.
WORKERS = 8
# Settings of a run that its trainer, or its DFlash 2 drafter, takes.
SELECTOR = ("selector_alpha", "selector_objective", "selector_inject", "selector_cut_off")
GEOMETRY = ("conv_kernel_size", "selector_rank", "selector_top_k")
# What all runs of a folder share, and their names do not say.
OF_A_FOLDER = ("num_layers", "num_taps", "num_heads", "num_key_value_heads", "head_dim", "intermediate_size")
OF_A_FOLDER += ("block_size", "mask_token_id", "num_train", "num_dev")


@dataclass
class StudyArguments:
    """Target, data, which runs, and the drafter's shape."""

    data: str = field(metadata={"help": "Folder with train.jsonl.gz and dev_greedy.jsonl.gz, or the file made of it."})
    target: str | None = field(default=None, metadata={"help": "Folder with the target; fetched if unset."})
    output_dir: str = field(default="outputs/study", metadata={"help": "Folder of the results; of study.npz too."})
    table: str = field(default=str(HERE / "study_runs.yaml"), metadata={"help": "The runs, by name."})
    runs: str = field(default="*", metadata={"help": "Names of runs, with * and ?, separated by commas."})
    baseline: str = field(default=BASELINE, metadata={"help": "Run that the table holds the others against."})
    extra: str = field(default="{}", metadata={"help": "Further runs as YAML: '{name: {objective: kl}}'."})
    seeds: str | None = field(default=None, metadata={"help": "Seeds for all runs in place of their own: '0,1,2'."})
    steps: int | None = field(default=None, metadata={"help": "Steps of all runs in place of their own."})
    max_minutes: float = field(default=9.0, metadata={"help": "Start no run that would end later."})
    list_runs: bool = field(default=False, metadata={"help": "Show the runs and end."})
    only_data: bool = field(default=False, metadata={"help": "Write study.npz, the tokens of the chats, and end."})
    decode_prompts: int = field(default=0, metadata={"help": "Prompts to decode after each run, beside the walk."})
    decode_tokens: int = field(default=64, metadata={"help": "Tokens to decode per prompt."})
    decode_temperature: float = field(default=0.0, metadata={"help": "Temperature to decode with; 0 is greedy."})
    save_drafters: bool = field(default=False, metadata={"help": "Save each run's drafter in bf16."})
    num_layers: int = field(default=5, metadata={"help": "Layers of the drafter."})
    num_taps: int = field(default=5, metadata={"help": "Target layers that it reads."})
    num_heads: int = field(default=9, metadata={"help": "Attention heads."})
    num_key_value_heads: int = field(default=3, metadata={"help": "Heads of keys and values."})
    head_dim: int = field(default=64, metadata={"help": "Size of a head."})
    intermediate_size: int = field(default=1536, metadata={"help": "Size of the MLP."})
    block_size: int = field(default=16, metadata={"help": "Slots per block."})
    mask_token_id: int = field(default=15, metadata={"help": "Token id of a slot to be drafted."})
    dev_rows: int = field(default=16, metadata={"help": "Rows of 1,024 tokens that are walked together."})
    num_train: int | None = field(default=None, metadata={"help": "Training documents to use; all by default."})
    num_dev: int | None = field(default=None, metadata={"help": "Documents to walk; all by default."})


@dataclass(frozen=True)
class Run:
    """The settings of one run; defaults are those of the reference.

    Args:
        name: Name in the table.
        reason: Why it is tried.
        seed: Of weights, order, anchors and noise.
        steps: Optimizer steps, over which the schedule goes.
        objective, gamma, alpha, slot_weights, temperature, cross_entropy_share: As for `make_objective`.
        rows: Rows of a step.
        row_length: Tokens of a row.
        num_anchors: Anchors per document.
        row_anchors: Cap on the anchors of a row; `num_anchors` by default.
        padded_anchors: Anchors that every row is padded to; `row_anchors` by default. Runs that agree in it, and in
            rows and their length, share the compiled layers.
        packed: Whether documents share rows; else each has one, and rows come in the trainer's order.
        context_noise: Half-width of the noise on the context.
        learning_rate, weight_decay, beta2, max_grad_norm: Of the optimizer.
        muon: Whether Muon steps the matrices.
        eight_bit: Whether AdamW keeps its state in 8 bits, by torchao.
        schedule: "cosine" or "warmup_stable_decay", which decays over the last `decay` of the steps.
        warmup: Share of the steps.
        intermediate_size: Of the drafter's MLP; that of all runs by default.
        dflash2: Whether the drafter is one of DFlash 2, which begins as the DFlash drafter of the same seed.
        conv_kernel_size, selector_rank, selector_top_k: Of DFlash 2; 0 leaves a part out.
        selector_alpha, selector_objective, selector_inject, selector_cut_off: As for `DFlashTrainingArguments`.
        restart_at: Share of the steps after which the schedule starts anew, on what was trained as DFlash until then.
    """

    name: str
    reason: str = ""
    seed: int = 0
    steps: int = 256
    objective: str = "dpace"
    gamma: float | None = None
    alpha: float = 0.5
    slot_weights: str | None = None
    temperature: float = 1.0
    cross_entropy_share: float = 0.0
    rows: int = 32
    row_length: int = 512
    num_anchors: int = 128
    row_anchors: int | None = None
    padded_anchors: int | None = None
    packed: bool = False
    context_noise: float = 0.0
    learning_rate: float = 6e-4
    weight_decay: float = 0.0
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    muon: bool = False
    eight_bit: bool = False
    schedule: str = "cosine"
    decay: float = 0.3
    warmup: float = 0.04
    intermediate_size: int | None = None
    dflash2: bool = False
    conv_kernel_size: int = 2
    selector_rank: int = 48
    selector_top_k: int = 16
    selector_alpha: float = 1.0
    selector_objective: str | None = None
    selector_inject: bool = False
    selector_cut_off: bool = False
    restart_at: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.name}-s{self.seed}-{self.steps}"

    def arguments(self, folder: str, on_cuda: bool) -> DFlashTrainingArguments:
        """What the trainer takes."""
        decays = {"num_decay_steps": round(self.decay * self.steps)} if self.schedule != "cosine" else None
        return DFlashTrainingArguments(
            folder,
            seed=self.seed,
            max_steps=self.steps,
            per_device_train_batch_size=self.rows,
            dataloader_drop_last=True,
            dataloader_num_workers=WORKERS if on_cuda else 0,
            row_length=self.row_length,
            num_anchors=self.num_anchors,
            objective=self.objective,
            loss_gamma=self.gamma,
            dpace_alpha=self.alpha,
            slot_weights=self.slot_weights,
            loss_temperature=self.temperature,
            cross_entropy_share=self.cross_entropy_share,
            context_noise=self.context_noise,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            adam_beta2=self.beta2,
            max_grad_norm=self.max_grad_norm,
            muon=self.muon,
            **({name: vars(self)[name] for name in SELECTOR} if self.dflash2 else {}),
            **({"optim": "adamw_torch_8bit"} if self.eight_bit else {}),
            lr_scheduler_type=self.schedule,
            lr_scheduler_kwargs=decays,
            warmup_steps=self.warmup,
            bf16=on_cuda,
            # In turn: what the target remembers is there at once.
            target_layout="shared",
            prefetch_depth=0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    (arguments,) = parse_config(StudyArguments, argv, description=(__doc__ or "").split("\n")[0])
    begin = time.perf_counter()
    output_dir = Path(arguments.output_dir)
    results_file = output_dir / "results.jsonl"
    done = read_results(results_file)
    shared = {name: vars(arguments)[name] for name in OF_A_FOLDER}
    refuse_other_studies(output_dir, done, shared)
    runs = [run for run in select_runs(arguments) if run.key not in {key_of(result) for result in done}]
    if arguments.list_runs or not (runs or arguments.only_data):
        print("\n".join(f"{run.key}: {run.reason}" for run in runs) or "Every run that was asked for is done.")
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    arguments.target = str(get_smollm2(arguments.target))
    if arguments.only_data:
        write_data(Path(arguments.data), arguments.target, output_dir / "study.npz")
        return
    objectives = {name for run in runs for name in (run.objective, run.selector_objective) if name}
    study = Study(arguments, any(map(compares_distributions, objectives)))
    print(f"Everything is loaded after {time.perf_counter() - begin:.0f} s.", flush=True)
    for run in runs:
        # By the slowest run so far; the first one is started in any case where there is time at all.
        slowest = max((result["seconds_per_step"] for result in done), default=0.0)
        expected = slowest * run.steps + OTHER_SECONDS if done else 0.0
        if time.perf_counter() - begin + expected > 60 * arguments.max_minutes:
            print(f"{run.key} is left for the next call: it would end after {arguments.max_minutes} minutes.")
            continue
        done.append(finish(study, run, output_dir) | {"shared": shared})
        with results_file.open("a") as lines:
            lines.write(json.dumps(done[-1]) + "\n")
        write_report(done, output_dir, arguments.baseline)
    print((output_dir / "table.md").read_text() if done else "No run was finished.")
    print(f"{time.perf_counter() - begin:.0f} s in all; results are in {output_dir}.")


# --- Runs and results


def select_runs(arguments: StudyArguments) -> list[Run]:
    """The runs that the command line asks for, one per seed, in the order of the table.

    Raises:
        ValueError: For an unknown field, or a name that fits no run.
    """
    table = yaml.safe_load(Path(arguments.table).read_text()) | (yaml.safe_load(arguments.extra) or {})
    known = {f.name for f in fields(Run)} | {"seeds"}
    patterns = [pattern.strip() for pattern in arguments.runs.split(",")]
    unused = [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in table)]
    if unused:
        raise ValueError(f"--runs names {', '.join(unused)}; the runs are {', '.join(table)}.")
    runs = []
    for name, values in table.items():
        values = dict(values or {})
        if not values.keys() <= known:
            raise ValueError(f"Run {name} has the fields {sorted(values.keys() - known)}; known are {sorted(known)}.")
        seeds = values.pop("seeds", [0])
        if arguments.seeds is not None:
            seeds = [int(seed) for seed in arguments.seeds.split(",")]
        run = Run(name=name, **values)
        if arguments.steps is not None:
            run = replace(run, steps=arguments.steps)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            runs += [replace(run, seed=seed) for seed in seeds]
    return runs


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(result: dict[str, Any]) -> str:
    return f"{result['name']}-s{result['seed']}-{result['steps']}"


def refuse_other_studies(output_dir: Path, done: list[dict[str, Any]], shared: dict[str, Any]) -> None:
    """End where a folder's runs are of another drafter or other data, and would be taken for those asked for."""
    for result in done:
        # Files of earlier versions do not say it.
        theirs = {**shared, **result.get("shared", {})}
        others = [f"{name} {theirs[name]} (now {value})" for name, value in shared.items() if theirs[name] != value]
        if others:
            raise SystemExit(f"The runs in {output_dir} have {', '.join(others)}. Give another --output_dir.")


# --- Chats to tokens, in one small file for machines that have neither the chats nor the Hub


def write_data(data: Path, target: str, output: Path) -> None:
    """Tokenise the chats of a folder: ids as uint16 one after another, lengths, spans and their number, by split."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    eos = GenerationConfig.from_pretrained(target).eos_token_id
    arrays: dict[str, Any] = {}
    for split in SPLITS:
        # Answers to evaluate on stay whole.
        limit = MAX_LENGTH if split == "train" else None
        chats = read_completions(str(data / f"{split}.jsonl.gz"))
        documents = list(tokenize_completions(chats, tokenizer, max_length=limit, eos_token_ids=eos))
        ids = np.concatenate([np.asarray(document["input_ids"]) for document in documents])
        if ids.max() >= 2**16:
            raise ValueError(f"The token id {ids.max()} does not fit 16 bits; this file is for small vocabularies.")
        spans = [np.asarray(document["supervised_spans"]).reshape(-1, 2) for document in documents]
        arrays[f"{split}_input_ids"] = ids.astype(np.uint16)
        arrays[f"{split}_lengths"] = np.array([len(document["input_ids"]) for document in documents], dtype=np.int32)
        arrays[f"{split}_spans"] = np.concatenate(spans).astype(np.int32)
        arrays[f"{split}_span_counts"] = np.array([len(rows) for rows in spans], dtype=np.int32)
        print(f"{split}: {len(documents)} documents, {len(ids)} tokens.")
    np.savez_compressed(output, **arrays)


def read_documents(path: str | Path, split: str) -> list[dict[str, Any]]:
    """Documents of one split of that file, as the collator takes them."""
    with np.load(path) as arrays:
        ids, lengths, spans, counts = (
            arrays[f"{split}_{name}"] for name in ("input_ids", "lengths", "spans", "span_counts")
        )
    ends = np.cumsum(lengths)[:-1], np.cumsum(counts)[:-1]
    pairs = zip(np.split(ids, ends[0]), np.split(spans, ends[1]), strict=True)
    return [{"input_ids": i.tolist(), "supervised_spans": s.tolist()} for i, s in pairs]


# --- One run


class OneDocumentARow(PackedDataset):
    """Rows of one document each: row i is document i."""

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        epoch, row = index if isinstance(index, tuple) else (0, index)
        return {"epoch": epoch, "documents": [{"document": row, **self.documents[row]}]}


class Study:
    """What all runs share: the target, its hidden states of all documents, and the rows to evaluate on.

    Args:
        arguments: Of the program; `target` is a folder.
        final_states: Whether a run compares with the target's distribution.
    """

    def __init__(self, arguments: StudyArguments, final_states: bool):
        self.arguments = arguments
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        # Objectives, shapes and modes are each a graph of the same functions.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
        data = Path(arguments.data)
        if data.is_dir():
            data = Path(arguments.output_dir) / "study.npz"
            write_data(Path(arguments.data), str(arguments.target), data)
        self.train = read_documents(data, "train")[: arguments.num_train]
        self.dev = read_documents(data, "dev_greedy")[: arguments.num_dev]
        self.config = drafter_config(arguments)
        taps = self.config.target_layer_ids or []
        options: dict[str, Any] = {"compile_target": True, "final_states": final_states, "dtype": self.dtype}
        self.target = RememberingTarget(arguments.target, taps, device=self.device, **options)
        self.target.remember(self.train + self.dev)
        self.head = FrozenHead(self.target.model, self.device)
        self.dev_batches = list(self._dev_batches(arguments.dev_rows))
        # Committed tokens and blocks of each document in the last walk, by which runs are compared.
        self.documents: list[list[int]] = []

    def _dev_batches(self, rows: int) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Batches to walk, on the device, with the target's hidden states."""
        dataset = PackedDataset(self.dev, DEV_ROW_LENGTH)
        collator = DataCollatorForDFlash(self.config.block_size or 0, num_anchors=1, row_length=DEV_ROW_LENGTH)
        collator.max_anchors_per_row = collator.pad_anchors_to_multiple_of = DEV_ROW_LENGTH // 4
        for first in range(0, len(dataset), rows):
            # The last batch is filled up with rows that were walked already, whose answers are left out again.
            batch = collator([dataset[row % len(dataset)] for row in range(first, first + rows)])
            context = self.target.context_hidden_states(batch["input_ids"], batch["document_lengths"])
            placed = {n: v.to(self.device) if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
            yield placed, context.to(self.dtype)

    @torch.no_grad()
    def walk(self, drafter: DFlashDraftModel) -> dict[str, float]:
        """The walk over all answers to evaluate on; with a selector also without it, and the best it could do."""
        drafter.eval()
        metrics: dict[str, float] = {}
        counts = {row: [0, 0] for row in range(len(self.dev))}
        for by in ("selector", "logits", "candidates") if selector_of(drafter) else ("selector",):
            sums, seen = WalkSums.zeros(self.config.block_size or 0), set()
            for batch, context in self.dev_batches:
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                    answers = walk_batch(drafter, drafter.config, self.head, batch, context, DEV_ANCHORS, by)
                for answer in answers:
                    if answer.document not in seen:
                        sums.add(answer)
                        if by == "selector":
                            counts[answer.document][0] += sum(answer.committed)
                            counts[answer.document][1] += len(answer.committed)
                seen |= {answer.document for answer in answers}
            own = sums.metrics()
            metrics |= own if by == "selector" else {f"acceptance_length_by_{by}": own["acceptance_length"]}
        drafter.train()
        self.documents = list(counts.values())
        return metrics

    def drafter(self, run: Run, trained: DFlashDraftModel | None = None) -> DFlashDraftModel:
        """The run's drafter, a new one or what one of DFlash that was trained becomes."""
        config = copy.deepcopy(self.config)
        config.intermediate_size = run.intermediate_size or config.intermediate_size
        torch.manual_seed(run.seed)
        drafter = DFlashDraftModel(config)
        if trained is not None:
            drafter.load_state_dict(trained.state_dict())
        if run.dflash2:
            drafter = DFlash2DraftModel.from_dflash(drafter, run.seed, **{name: vars(run)[name] for name in GEOMETRY})
        return drafter.to(self.device)

    def trainer(self, run: Run, folder: str, trained: DFlashDraftModel | None = None) -> "StudyTrainer":
        """The run's trainer, with a drafter of its own."""
        drafter = self.drafter(run, trained)
        rows = (PackedDataset if run.packed else OneDocumentARow)(self.train, run.row_length, run.seed)
        anchors = run.row_anchors or run.num_anchors
        padded = run.padded_anchors or anchors
        collator = DataCollatorForDFlash(
            self.config.block_size or 0,
            run.num_anchors,
            run.seed,
            anchors,
            run.row_length,
            pad_anchors_to_multiple_of=padded,
        )
        args = run.arguments(folder, self.device.type == "cuda")
        trainer = StudyTrainer(drafter, self.target, args, data_collator=collator, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        return trainer


class StudyTrainer(DFlashTrainer):
    """The trainer, which counts the documents' tokens and the clipped steps without waiting for the device."""

    tokens, clipped = 0, 0.0

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.tokens += sum(map(sum, inputs["document_lengths"]))
        return super().training_step(model, inputs, num_items_in_batch)

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm)
        self.clipped = self.clipped + (norm > self.args.max_grad_norm)
        return norm


class Walks(TrainerCallback):
    """Logs and walks after some shares of the steps and times the steps between, the first one, which compiles, apart.

    Args:
        study: Gives the walk.
        trainer: Counts tokens.
        run: What is trained.
        before: Steps that were trained before; of `total` in all.
    """

    def __init__(self, study: Study, trainer: StudyTrainer, run: Run, before: int, total: int):
        self.study, self.trainer, self.run, self.before = study, trainer, run, before
        points = {max(1, round(share * total)) - before for share in WALKS}
        self.points = sorted(point for point in points if 0 < point <= run.steps)
        self.seconds, self.first_step_seconds = 0.0, 0.0
        self.metrics: dict[str, float] = {}
        self.by_step: dict[str, dict[str, Any]] = {"acceptance_length": {}, "losses": {}, "tokens": {}}

    def now(self) -> float:
        if self.study.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = self.now()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.first_step_seconds = self.now() - self.start
            self.start = self.now()
        control.should_log = state.global_step in self.points

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if "loss" not in logs:
            return
        step = state.global_step
        self.seconds += self.now() - self.start
        self.metrics = self.study.walk(model)
        values = (self.metrics["acceptance_length"], logs["loss"], self.trainer.tokens)
        for name, value in zip(self.by_step, values, strict=True):
            self.by_step[name][str(self.before + step)] = value
        print(
            f"{self.run.key} step {step}: loss {logs['loss']:.3f}, tau {values[0]:.3f}, "
            f"{self.seconds / max(step - 1, 1):.4f} s a step",
            flush=True,
        )
        self.start = self.now()


def train(study: Study, run: Run) -> tuple[dict[str, Any], DFlashDraftModel]:
    """Train one run.

    Returns:
        The run's settings with `acceptance_length`, `losses` and `tokens` by step, `metrics` of the last walk,
        `parameters`, `seconds_per_step`, `first_step_seconds`, `clipped` (share of the steps) and `peak_gib`; and the
        drafter.
    """
    first = round(run.restart_at * run.steps)
    if not first:
        return train_once(study, run)
    start, trained = train_once(study, replace(run, steps=first, dflash2=False), total=run.steps)
    # Rows in another order than before.
    own = replace(run, steps=run.steps - first, seed=run.seed + 1000)
    result, drafter = train_once(study, own, trained, first, run.steps)
    read = max(start["tokens"].values())
    result["tokens"] = {step: read + tokens for step, tokens in result["tokens"].items()}
    joined = {name: start[name] | result[name] for name in ("acceptance_length", "losses", "tokens")}
    return result | asdict(run) | joined, drafter


def train_once(
    study: Study, run: Run, trained: DFlashDraftModel | None = None, before: int = 0, total: int | None = None
) -> tuple[dict[str, Any], DFlashDraftModel]:
    """Train a new drafter, or go on with one after some of all steps; returns what `train` does."""
    on_cuda = study.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trainer = study.trainer(run, folder, trained)
        walks = Walks(study, trainer, run, before, total or run.steps)
        trainer.add_callback(walks)
        trainer.train()
    result = asdict(run) | walks.by_step | {"metrics": walks.metrics}
    result |= {"parameters": trainer.model.num_parameters(), "documents": study.documents}
    result["seconds_per_step"] = walks.seconds / max(run.steps - 1, 1)
    result["first_step_seconds"] = walks.first_step_seconds
    result["clipped"] = float(trainer.clipped) / run.steps
    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if on_cuda else None
    return result, trainer.model


def finish(study: Study, run: Run, output_dir: Path) -> dict[str, Any]:
    """Train a run, save and decode as asked for."""
    started = time.perf_counter()
    result, drafter = train(study, run)
    if study.arguments.save_drafters:
        folder = output_dir / f"drafter-{run.key}"
        drafter.save_pretrained(folder, dtype=torch.bfloat16)
        write_facts(study_facts(result), folder)
    if study.arguments.decode_prompts:
        result |= decode(study, drafter)
    return result | {"seconds": time.perf_counter() - started}


def drafter_config(arguments: StudyArguments) -> DFlashDraftConfig:
    return DFlashDraftConfig.from_target_config(
        AutoConfig.from_pretrained(arguments.target),
        num_taps=arguments.num_taps,
        num_hidden_layers=arguments.num_layers,
        num_attention_heads=arguments.num_heads,
        num_key_value_heads=arguments.num_key_value_heads,
        head_dim=arguments.head_dim,
        intermediate_size=arguments.intermediate_size,
        block_size=arguments.block_size,
        mask_token_id=arguments.mask_token_id,
    )


def decode(study: Study, trained: DFlashDraftModel) -> dict[str, Any]:
    """Real decoding of some prompts, in the target's type, and the walk over the answers that come out."""
    arguments = study.arguments
    # A copy, since the attention of the one that was trained is named in its configuration.
    drafter = type(trained)(copy.deepcopy(trained.config)).to(study.device, study.dtype)
    drafter.load_state_dict(trained.state_dict())
    drafter.set_attn_implementation("sdpa")
    drafter.eval()
    prompts = [d["input_ids"][: d["supervised_spans"][0][0]] for d in study.dev[: arguments.decode_prompts]]
    settings = DecodingSettings(arguments.decode_tokens, temperature=arguments.decode_temperature)
    report = measure_acceptance(study.target.model, drafter, prompts, settings=settings)
    walked = walked_acceptance_length(study.target.model, drafter, report, progress=False)
    print(f"{len(prompts)} prompts decoded: tau {report.acceptance_length:.3f}, by the walk {walked}.")
    return {
        "decoded_acceptance_length": report.acceptance_length,
        "walked_acceptance_length": walked,
        "decoded_prompts": len(prompts),
        "decode_temperature": settings.temperature,
        "lossless": report.lossless,
        "speedup": report.tokens_per_second / report.plain_tokens_per_second,
    }


if __name__ == "__main__":
    main()
