# SPDX-License-Identifier: Apache-2.0
"""`DFlashTrainer`: a transformers Trainer that runs a frozen target beside the drafter it trains.

A batch of [`DataCollatorForDFlash`] holds B packed rows of T tokens with N anchors each, `input_ids` `[B, T]`,
`anchor_positions` `[B, N]` and `labels` `[B, N, b]` for blocks of b slots. From the target come
`context_hidden_states` `[B, T, K * D]` (K taps of width D) and, for objectives that compare with the target's
distribution, `final_hidden_states` `[B, T, D]`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, SaveStrategy
from transformers.utils import logging

from .acceptance import WalkedAnswer, WalkSums, walk_batch
from .adapting import check_continuing, check_part, check_resumed_part, is_adapter, make_trainable
from .callbacks import (
    CompressGradients,
    Interrupts,
    StepGuard,
    TrainingInterrupted,
    check_can_learn,
    first_nonfinite_parameter,
    spare_workers,
)
from .checkpointing import decided_by_main, rotate, set_aside, step_of, write_checkpoint, writes_alone
from .configuration_dflash import DFlashDraftConfig
from .configuration_dflash2 import DFlash2DraftConfig
from .data_collator import IGNORE_INDEX, DataCollatorForDFlash, check_documents, check_token_ids, num_valid_anchors
from .documents import check_documents_fit
from .frozen_target import (
    FrozenHead,
    FrozenTarget,
    mask_token_for,
    read_eos_token_ids,
    read_target_config,
    varied_lengths,
)
from .losses import BlockSums, Objective, add_context_noise, drafter_loss
from .model_card import CardOptions, TrainingFacts, read_facts
from .modeling_dflash import DFlashDraftModel
from .modeling_dflash2 import selector_of
from .operations import batch_operations, drafter_weights
from .optimizers import muon_with_adamw
from .packing import PackedDataset, RowSampler, document_lengths, with_sources
from .prefetch import make_pair, place_target
from .publishing import check_push, push_checkpoint, push_run, write_card
from .remote_checkpoints import RemoteCheckpointCallback
from .resuming import (
    EVALUATION_DUE,
    RECORD_NAME,
    is_evaluation_due,
    own_settings,
    prepare_output,
    read_record,
    resume_folder,
    run_record,
    write_record,
)
from .selector_losses import SelectorTerms, selector_terms
from .tokenizing import load_documents, tokenize_completions
from .training_args import OBJECTIVE_ARGUMENTS, SELECTOR_ARGUMENTS, DFlashTrainingArguments, check_trainer_options


logger = logging.get_logger(__name__)

# Anchor slots of a row are padded to a multiple of this, so that their slots fill whole tiles of the attention.
ANCHOR_BUCKET = 64
# Any of these columns makes a row of data a chat.
CHAT_COLUMNS = {"messages", "conversations", "prompt", "request"}
DOCUMENT_COLUMNS = {"input_ids", "supervised_spans"}
# Of all figures of a step and of an evaluation, those that trackers and notebooks show.
SHOWN = ("loss", "acceptance_length", "accuracy")
# Rows of the embedding that no text holds, by which the published drafters of these families are masked.
# Fewer steps than this teach a drafter next to nothing, and one that commits less drafts next to nothing.
FEW_STEPS, LITTLE_ACCEPTED = 20, 1.1

Reduce = Callable[[torch.Tensor], torch.Tensor]  # adds a tensor up over the ranks


class TrainingSums:
    """Sums of the blocks trained on since the last log, and of the present step."""

    def __init__(self, block_size: int, device: torch.device):
        self.blocks, self.step = BlockSums.zeros(block_size, device), BlockSums.zeros(block_size, device)

    def end_step(self, left_out: torch.Tensor) -> None:
        """Keep the present step's sums, unless the step is left out, which the device knows."""
        self.blocks.values += torch.where(left_out, torch.zeros_like(self.step.values), self.step.values)
        self.step.values.zero_()

    def take(self, reduce: Reduce) -> dict[str, float]:
        """The metrics, whose loss is NaN where no step was kept; the next ones start from nothing."""
        sums = BlockSums(reduce(self.blocks.values))
        self.blocks.values.zero_()
        return sums.metrics() | ({} if sums.values[1] > 0 else {"loss": float("nan")})


class EvaluationSums:
    """Sums of one evaluation: blocks at random anchors, and the walks of whole answers by their source."""

    def __init__(self, block_size: int, device: torch.device, dataset: Any = None):
        self.blocks = BlockSums.zeros(block_size, device)
        self._sources: list[str] | None = dataset.sources if isinstance(dataset, PackedDataset) else None
        self.walk = WalkSums.zeros(block_size, sorted(set(self._sources or [])))

    def add_answer(self, answer: WalkedAnswer) -> None:
        self.walk.add(answer, None if self._sources is None else self._sources[answer.document])

    def metrics(self, reduce: Reduce) -> dict[str, float]:
        """Loss and acceptance as ratios of sums over all blocks and ranks."""
        blocks, walked = reduce(self.blocks.values), reduce(self.walk.values.to(self.blocks.values.device))
        return BlockSums(blocks).metrics() | WalkSums(walked, self.walk.sources).metrics()


class SetEpoch(TrainerCallback):
    """Tells the sampler the epoch; accelerate does not reach it through a resumed, sharded dataloader."""

    def __init__(self, sampler: RowSampler):
        self.sampler = sampler

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.sampler.set_epoch(int((state.epoch or 0) + 1e-6))


class DueEvaluation(TrainerCallback):
    """Makes up for the evaluation that an interrupt left out, so that the best checkpoint is chosen among the same."""

    def __init__(self, trainer: "DFlashTrainer"):
        self.trainer = trainer
        self.folder: Path | None = None  # the checkpoint that the run goes on from

    def on_train_begin(self, args, state, control, **kwargs):
        if is_evaluation_due(self.folder):
            # The parent's own two halves of an evaluation in training; together they are part of its step.
            metrics = self.trainer._evaluate(None, None)
            if self.trainer._determine_best_metric(metrics, None):
                state.best_model_checkpoint = str(self.folder)


def documents_reader(
    args: DFlashTrainingArguments, target: str, tokenizer: PreTrainedTokenizerBase
) -> Callable[..., Dataset]:
    """[`load_documents`] of an address, and a split, as a run's arguments say; `target` is a Hub id or folder."""
    return partial(
        load_documents, tokenizer=tokenizer, allow_other_template=args.allow_other_template, **tokenizing(args, target)
    )


def tokenizing(args: DFlashTrainingArguments, target: "str | FrozenTarget") -> dict[str, Any]:
    """How chats are tokenised in a run; the target's end-of-sequence ids end an answer."""
    return {
        "max_length": args.max_length or args.row_length,
        "enable_thinking": args.enable_thinking,
        "eos_token_ids": read_eos_token_ids(target) if isinstance(target, str) else target.eos_token_ids,
    }


def settle_objective(args: DFlashTrainingArguments, drafter: str | Path | None) -> None:
    """Continue a drafter by the objective that its folder records, unless the arguments name another: it would forget.

    `drafter` is its folder or Hub id, None for a new one; what is not recorded is cross-entropy.
    """
    recipe = _recorded_recipe(Path(drafter)) if drafter else None
    own = None if recipe is None else {name: recipe[name] for name in OBJECTIVE_ARGUMENTS if name in recipe}
    if not args.objective_given:
        args.take_objective(own or {})
        if own:
            logger.warning_once(
                f"The objective is that of {drafter}: {', '.join(f'{k}={v}' for k, v in own.items())}."
            )
    elif own is not None and own.get("objective", "cross_entropy") != args.objective:
        logger.warning(
            f"{drafter} was trained by objective={own.get('objective', 'cross_entropy')} and goes on by "
            f"{args.objective}, so it may draft less of what the data lacks. Leave objective out to go on as before."
        )


def _recorded_recipe(folder: Path) -> dict[str, Any] | None:
    """The arguments that a drafter's folder, of a finished run or a checkpoint, records; None where it has none."""
    if (facts := read_facts(folder)) is not None:
        return facts.get("recipe") or {}
    return read_record(folder)["arguments"] if (folder / RECORD_NAME).is_file() else None


def row_anchors(rows: PackedDataset, args: DFlashTrainingArguments) -> tuple[float, int]:
    """Mean anchors of a row, and those that all rows are padded to where kernels are compiled: the largest row's."""
    cap = args.max_anchors_per_row or max(1, rows.row_length // 4)
    draws = np.minimum(num_valid_anchors(rows.documents), args.num_anchors)
    mean = min(float(draws.sum()), cap * len(rows)) / len(rows)
    return mean, _padded(min(cap, rows.largest_row_sum(draws)))


def _padded(anchors: int) -> int:
    return -(-anchors // ANCHOR_BUCKET) * ANCHOR_BUCKET


def make_collator(rows: PackedDataset | None, args: DFlashTrainingArguments, block_size: int) -> DataCollatorForDFlash:
    """The collator of packed rows; where kernels are compiled, all batches have one shape."""
    row_length = args.row_length if rows is None else rows.row_length
    cap = args.max_anchors_per_row or max(1, row_length // 4)
    collator = DataCollatorForDFlash(block_size, args.num_anchors, _data_seed(args), cap)
    if args.device.type != "cpu":
        collator.row_length = row_length
        collator.pad_anchors_to_multiple_of = _padded(cap) if rows is None else row_anchors(rows, args)[1]
    return collator


def compile_layers(model: DFlashDraftModel, **kwargs) -> None:
    """Compile each layer by itself, in place: layers of one kind share their code, so two compilations serve all.

    Parameters keep their names; `kwargs` are those of `torch.compile`, such as the backend.
    """
    # Training and evaluation, layer kinds and the last, shorter batch are graphs of one function; falling back to
    # uncompiled flex attention would need the memory of all queries times all keys.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    # Data parallel training would cut each layer's graph where a bucket of 25 MB of its parameters is full: pieces
    # that do not fuse, keep more for the backward and round otherwise than one rank's. Gradients cross under the
    # backward of the layers before as it is.
    torch._dynamo.config.optimize_ddp = False
    for layer in model.layers:
        layer.compile(dynamic=False, **kwargs)


def _data_seed(args: DFlashTrainingArguments) -> int:
    """The seed of rows, anchors and noise."""
    return args.seed if args.data_seed is None else args.data_seed


def readable(data: Any, preferred_split: str | None = None) -> Any:
    """Data that can be packed: one split of a `DatasetDict`, or what was given; anything else is a ValueError.

    Nothing is asked that needs the target, so that wrong data shows before one is loaded. None stays None.
    """
    if isinstance(data, DatasetDict):
        names = list(data)
        if preferred_split not in data and len(names) != 1:
            raise ValueError(f"The data is a DatasetDict of {names}: give one split, such as data[{names[0]!r}].")
        data = data[preferred_split if preferred_split in data else names[0]]
    if data is None or isinstance(data, PackedDataset):
        return data
    if isinstance(data, IterableDataset | IterableDatasetDict | torch.utils.data.IterableDataset):
        raise ValueError(
            f"The data is a {type(data).__name__}, a stream, whose rows cannot be packed and shuffled. Tokenise it "
            "with `dflash-hf tokenize`, and open the folder that it writes with dflash_hf.load_documents."
        )
    if not isinstance(data, Dataset | list | tuple) or len(data) == 0:
        raise ValueError(
            f"The data is a {type(data).__name__} without documents; give a datasets.Dataset, a list of chats or "
            "documents, or a PackedDataset. dflash_hf.load_documents opens files and folders."
        )
    for index, names in enumerate([data.column_names] if isinstance(data, Dataset) else data):
        if not set(names) >= DOCUMENT_COLUMNS and not (CHAT_COLUMNS & set(names) and holds_chats(data)):
            raise ValueError(
                f"Row {index} of the data has the columns {list(names)}; expected chats (messages, conversations, or "
                "prompt and completion) or documents (input_ids and supervised_spans)."
            )
    return data


def holds_chats(data: Any) -> bool:
    """Whether rows are chats that are still to be tokenised."""
    return not set(data.column_names if isinstance(data, Dataset) else data[0]) >= DOCUMENT_COLUMNS


def tokenizer_of(target_model: Any, init_kwargs: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a target's id or folder; None where there is none, since documents need none."""
    name = target_model.name_or_path if isinstance(target_model, PreTrainedModel) else target_model
    if not name or not isinstance(name, str | Path):
        return None
    places = ("revision", "cache_dir", "local_files_only", "trust_remote_code")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **{k: v for k, v in init_kwargs.items() if k in places})
    except (OSError, ValueError):
        return None
    # Beside a mere configuration transformers makes up an empty tokenizer of its family.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def new_drafter_config(
    target_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    kind: type[DFlashDraftConfig] = DFlashDraftConfig,
    **fields: Any,
) -> DFlashDraftConfig:
    """A drafter's configuration as it follows from a target's; of `fields`, the mask token may be left out."""
    text_config = target_config.get_text_config(decoder=True)
    if fields.get("mask_token_id") is None:
        fields["mask_token_id"] = mask_token_for(text_config, tokenizer)
        logger.warning_once(f"The new drafter's mask token is mask_token_id={fields['mask_token_id']}.")
    if not fields.keys() & {"num_taps", "target_layer_ids"}:
        # As many as the drafter has layers, where the target is deep enough for them.
        fields["num_taps"] = max(1, min(fields.get("num_hidden_layers", 5), text_config.num_hidden_layers - 3))
    return kind.from_target_config(target_config, **fields)


class DFlashTrainer(Trainer):
    r"""
    Trains a drafter on the hidden states of a frozen target, computed as they are needed.

        trainer = DFlashTrainer(
            "z-lab/Qwen3-4B-DFlash-b16", "Qwen/Qwen3-4B", train_dataset=load_dataset("org/chats", split="train")
        )
        trainer.train()

    Args:
        model: The drafter (`DFlashDraftModel`), or the folder or Hub id of one to continue; None makes a new one for
            the target. Its parameters are kept in fp32.
        target_model: The target, by Hub id, folder, or loaded (`PreTrainedModel`, `FrozenTarget`). It is frozen and
            belongs to no checkpoint.
        args: What to train with.
        data_collator: Makes batches of packed rows; a [`DataCollatorForDFlash`] by default.
        train_dataset, eval_dataset: A `datasets.Dataset` or list of chats (`messages`, `conversations`, or `prompt`
            and `completion`, as texts or messages) or of documents (`input_ids`, `supervised_spans`), or a
            [`PackedDataset`]; [`load_documents`] opens a folder. Of a `DatasetDict`, `train` is trained on. Several
            evaluation sets may be given by name.
        processing_class: The target's tokenizer, by default the one that its id or folder has; needed for chats.
        peft_config: Train an adapter, saved without the drafter, in place of its weights; without `target_modules`, of
            all matrices. [`adapters.lora_config`] makes one, [`adapters.merge_adapter`] the new drafter.
        recipe: What a script was started with, as JSON; written into every checkpoint's `dflash_run.json`.
        **kwargs: Further arguments of [`~transformers.Trainer`].

    Raises:
        ValueError: When drafter, target and data do not fit together, or nothing in the data can be learned from.
    """

    args: DFlashTrainingArguments
    objective: Objective
    # The parent's annotations allow for None, which none of these is.
    model: Any
    optimizer: Any
    _drafter_config: Any
    # The loss is normalised over the whole optimizer step before it reaches the parent.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: "DFlashDraftModel | str | Path | None",
        target_model: "str | Path | PreTrainedModel | FrozenTarget",
        args: DFlashTrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: Any = None,
        recipe: dict[str, Any] | None = None,
        **kwargs,
    ):
        self.args = args = args if args is not None else DFlashTrainingArguments()
        if not isinstance(args, DFlashTrainingArguments):
            raise ValueError(f"args is a {type(args).__name__}; DFlashTrainer needs DFlashTrainingArguments.")
        check_trainer_options(kwargs, args)
        self.recipe = recipe
        train_dataset = readable(train_dataset, "train")
        is_several = isinstance(eval_dataset, dict) and not isinstance(eval_dataset, DatasetDict)
        sets = {k: readable(data) for k, data in (eval_dataset if is_several else {"eval": eval_dataset}).items()}
        init_kwargs: Any = args.target_model_init_kwargs or {}  # a JSON string became a dict in TrainingArguments
        is_tokenizer = isinstance(processing_class, PreTrainedTokenizerBase)
        # Read when it is first needed, after what can be refused without a network.
        self._read_tokenizer = lambda: processing_class if is_tokenizer else tokenizer_of(target_model, init_kwargs)
        drafter = self._prepare_models(model, target_model, peft_config, init_kwargs)
        train_dataset = self._pack(train_dataset)
        sets = {name: self._pack(data) for name, data in sets.items()}
        if data_collator is None:
            rows = train_dataset or (None if is_several else sets["eval"])
            data_collator = make_collator(rows, args, self._drafter_config.block_size)
        if args.muon:
            kwargs.setdefault("optimizer_cls_and_kwargs", muon_with_adamw(args, drafter))
        super().__init__(
            model=drafter,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=sets if is_several else sets["eval"],  # type: ignore[arg-type]
            processing_class=processing_class or self._tokenizer,
            **kwargs,
        )
        self._watch(drafter)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._read_tokenizer()

    # Drafter and target

    def _prepare_models(self, model: Any, target_model: Any, peft_config: Any, init_kwargs: Any) -> nn.Module:
        """Load, check and place drafter and target; returns the part of the drafter that is trained."""
        args = self.args
        if not isinstance(target_model, str | Path | PreTrainedModel | FrozenTarget):
            raise ValueError(f"target_model is a {type(target_model).__name__}; give a Hub id, a folder or a model.")
        if model is None:
            model = self._new_drafter(target_model)
        drafter: Any = DFlashDraftModel.from_pretrained(model) if isinstance(model, str | Path) else model
        config = self._drafter_config = drafter.config
        if not isinstance(config, DFlashDraftConfig):
            raise ValueError(f"model is a {type(drafter).__name__}, not a DFlashDraftModel; the target comes second.")
        check_push(args)
        settle_objective(args, config.name_or_path)
        self.objective = args.make_objective(config.block_size)
        unread = [name for name in SELECTOR_ARGUMENTS if vars(args)[name] != vars(DFlashTrainingArguments)[name]]
        if unread and selector_of(drafter) is None:
            raise ValueError(f"{', '.join(unread)} are for a DFlash 2 drafter (dflash2=True): leave them out.")
        check_part(drafter, peft_config, args.trainable_modules)
        self.target = self._frozen_target(target_model, init_kwargs)
        check_continuing(config, self.target, self._tokenizer)
        self.head = FrozenHead(self.target.model, args.device)
        # A frozen drafter under autocast needs no fp32 masters.
        is_frozen = is_adapter(drafter) or peft_config is not None
        self._prepare_drafter(drafter, keep_dtype=is_frozen and (args.bf16 or args.fp16))
        return make_trainable(drafter, peft_config, args.trainable_modules, args.seed)

    def _new_drafter(self, target_model: "str | Path | PreTrainedModel | FrozenTarget") -> DFlashDraftModel:
        """A drafter of the shape that follows from the target, its weights drawn on its device from the seed."""
        is_name = isinstance(target_model, str | Path)
        target_config = read_target_config(str(target_model)) if is_name else target_model.config  # type: ignore[union-attr]
        taps: dict[str, Any] = (
            {"target_layer_ids": target_model.target_layer_ids} if isinstance(target_model, FrozenTarget) else {}
        )
        config = new_drafter_config(target_config, self._tokenizer, **taps)
        set_seed(self.args.seed)
        with self.args.device:
            return DFlashDraftModel(config)

    def _frozen_target(self, target_model: "str | Path | PreTrainedModel | FrozenTarget", given: Any) -> FrozenTarget:
        """The target that the trainer was given, loaded with the given arguments and placed."""
        args, final_states = self.args, self.args.compares
        if isinstance(target_model, FrozenTarget):
            if final_states and not target_model.final_states:
                raise ValueError(f"objective={args.objective!r} needs FrozenTarget(..., final_states=True).")
            if given:
                raise ValueError(f"target_model_init_kwargs={given} cannot act on a FrozenTarget, which is loaded.")
            return target_model
        device, spread = place_target(args)
        return FrozenTarget(
            target_model,
            self._drafter_config.target_layer_ids or [],
            device=device,
            compile_target=args.compile_target,
            allow_slow_target=args.allow_slow_target,
            final_states=final_states,
            **({**spread, **given} if isinstance(target_model, str | Path) else given),
        )

    def _prepare_drafter(self, drafter: DFlashDraftModel, keep_dtype: bool) -> None:
        """Give a drafter fp32 masters and an attention backend that can train on the device, and compile it."""
        args, on_gpu = self.args, self.args.device.type == "cuda"
        if not keep_dtype and any(p.dtype in (torch.bfloat16, torch.float16) for p in drafter.parameters()):
            # AdamW steps at these rates vanish in bf16: norm weights would never move.
            logger.info("The drafter's parameters are kept in fp32; use bf16=True for autocast.")
            drafter.float()
        if args.cpu_for_want_of_gpu and args.process_index == 0:
            logger.warning_once(
                "torch finds no GPU, so target and drafter run on the CPU. If the CPU is meant, set use_cpu=True; if "
                "not, this says what is wrong: python -c 'import torch; torch.zeros(1).cuda()'."
            )
        implementation = args.drafter_attn_implementation or ("flex_attention" if on_gpu else "sdpa")
        if implementation == "flex_attention" and args.device.type == "cpu":
            raise ValueError("flex_attention has no backward on CPU; leave drafter_attn_implementation unset.")
        drafter.set_attn_implementation(implementation)
        if (on_gpu if args.compile_layers is None else args.compile_layers) and not args.torch_compile:
            compile_layers(drafter)

    def _watch(self, drafter: Any) -> None:
        """Sums that become metrics, callbacks in the order they are called in, and how ranks exchange gradients."""
        args, block_size = self.args, self._drafter_config.block_size
        self._weights = drafter_weights(drafter)
        self._trained = TrainingSums(block_size, args.device)
        self._evaluated = EvaluationSums(block_size, args.device)
        self._details: dict[str, dict[str, float]] = {}  # of evaluations that are still to be logged, by their loss
        self.prefetcher, self.throughput = make_pair(self.target, args)
        self._is_pair = args.device not in {parameter.device for parameter in self.target.model.parameters()}
        self._guard = StepGuard(drafter, args.max_nonfinite_steps, scaled=self.accelerator.scaler is not None)
        self._interrupts = Interrupts(args.world_size)
        self._due_evaluation = DueEvaluation(self)
        remote = args.remote_checkpoint_dir
        for callback in (
            self.throughput,
            *([CompressGradients(lambda: self.model_wrapped)] if args.ddp_bf16_compression else []),
            TrainingFacts(self),
            *(self._guard, self._interrupts, self._due_evaluation),
            *([] if remote is None else [RemoteCheckpointCallback(remote)]),
        ):
            self.add_callback(callback)
        ddp = self.accelerator.ddp_handler
        if ddp is not None:
            # Every parameter takes part in every step, so there is no graph to search for those that do not.
            ddp.find_unused_parameters = bool(args.ddp_find_unused_parameters)
            # A second copy of the gradients would be 4 bytes for each parameter.
            ddp.gradient_as_bucket_view = True

    # Data

    def _pack(self, data: Any) -> PackedDataset | None:
        """Chats, documents or rows to packed rows, checked before any GPU time is spent; None stays None."""
        data, config = readable(data), self._drafter_config
        if data is None:
            return None
        documents = data.documents if isinstance(data, PackedDataset) else self._documents(data)
        check_documents_fit(documents, self._tokenizer, self.args.allow_other_template)
        check_documents(documents, config.block_size)
        check_token_ids(documents, self.head.vocab_size, config.mask_token_id)
        longest = int(document_lengths(documents).max())
        if longest > config.max_position_embeddings:
            raise ValueError(
                f"A document has {longest} tokens, beyond the drafter's max_position_embeddings="
                f"{config.max_position_embeddings}, where servers fail. Give its config the target's, or cut the "
                "documents (max_length)."
            )
        if isinstance(data, PackedDataset):
            return data
        return PackedDataset(documents, self.args.row_length, seed=_data_seed(self.args))

    def _documents(self, data: Any) -> Any:
        if not holds_chats(data):
            return data
        if self._tokenizer is None:
            raise ValueError("The data holds chats, and the target has no tokenizer: pass it as processing_class.")
        documents = tokenize_completions(list(data), self._tokenizer, **tokenizing(self.args, self.target))
        return with_sources(documents, data)

    def get_train_dataloader(self):
        """The parent's dataloader, whose batches stay on the host until the prefetcher sends them where they go."""
        dataloader: Any = super().get_train_dataloader()
        dataloader.device = None
        return spare_workers(dataloader)

    def _get_train_sampler(self, train_dataset=None):
        # The parent's samplers draw from a generator whose state depends on how often it was asked; rows are
        # shuffled from (seed, epoch) alone, so that any resumed or split run sees the same order.
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if not isinstance(dataset, PackedDataset):
            return super()._get_train_sampler(dataset)
        sampler = RowSampler(len(dataset), seed=_data_seed(self.args))
        self.remove_callback(SetEpoch)
        self.add_callback(SetEpoch(sampler))
        return sampler

    def get_eval_dataloader(self, eval_dataset=None):
        """The parent's dataloader; data given to `evaluate` may be chats or documents, as in the constructor."""
        if eval_dataset is None or isinstance(eval_dataset, str) or eval_dataset is self.eval_dataset:
            return spare_workers(super().get_eval_dataloader(eval_dataset))  # type: ignore[arg-type]
        # The parent keeps dataloaders with persistent workers by name alone, and gives that of the trainer's own data.
        return self.get_test_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset):
        """The parent's dataloader; data given to `predict` may be chats or documents, as in the constructor."""
        persistent = self.args.dataloader_persistent_workers
        # It is used once, and accelerate would keep it, with its workers, as long as the trainer.
        self.args.dataloader_persistent_workers = False
        try:
            return spare_workers(super().get_test_dataloader(self._pack(test_dataset)))  # type: ignore[arg-type]
        finally:
            self.args.dataloader_persistent_workers = persistent

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Collect the micro-batches of one optimizer step and what the step's loss is divided by, over all ranks."""
        if self.state.global_step >= self.state.max_steps:
            # Resumed from the last checkpoint of a finished run, where Trainer would take one step more.
            return [], None
        epoch_iterator = self.prefetcher.look_ahead(epoch_iterator, self.accelerator.gradient_state)
        batch_samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batch_samples:
            batch_samples[-1] = self._without_repeated_rows(batch_samples[-1], self.args.train_batch_size)
        total = torch.zeros((), device=device)
        for batch in batch_samples:
            total = total + self._normalizer(batch).to(device)
        # Whether a signal came travels with the normaliser, so that all ranks stop at the same step.
        total, interrupted = self._reduce(torch.stack([total, self._interrupts.flag(device)]))
        self._interrupts.agree(interrupted)
        return batch_samples, total

    def _normalizer(self, inputs: dict[str, Any]) -> torch.Tensor:
        return self.objective.normalizer(inputs["labels"][..., 1:] != IGNORE_INDEX)

    def _without_repeated_rows(self, inputs: dict[str, Any], rows_per_rank: int) -> dict[str, Any]:
        """A batch in which the rows count nothing that accelerate repeats, so that all ranks have as many."""
        args, state = self.args, self.accelerator.gradient_state
        remainder = state.remainder
        if remainder < 0 and state.end_of_dataloader and not args.dataloader_drop_last:
            # accelerate does not know it in an epoch that was resumed.
            remainder = len(state.active_dataloader.dataset) % (rows_per_rank * args.world_size)
        if args.world_size == 1 or not state.end_of_dataloader or remainder <= 0:
            return inputs
        own = max(0, remainder - args.process_index * rows_per_rank)
        changed = {"labels": inputs["labels"].clone()}
        changed["labels"][own:] = IGNORE_INDEX
        if "counted_slots" in inputs:
            changed["counted_slots"] = inputs["counted_slots"].copy()
            changed["counted_slots"][own:] = 0
        return {**inputs, **changed}

    # Steps

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Run the target, then the drafter, then the loss through the frozen head.

        `inputs` is a batch of [`DataCollatorForDFlash`], `num_items_in_batch` the normaliser of the whole optimizer
        step over all ranks; None stands for this batch's own. The losses of micro-batches add up to the step's (mean
        over ranks). With `return_outputs` the drafter's output comes too, and the context that it read.
        """
        args, config = self.args, self._drafter_config
        if inputs["labels"].shape[-1] != config.block_size:
            slots = inputs["labels"].shape[-1]
            raise ValueError(
                f"The collator's block_size is {slots}, the drafter's {config.block_size}. Give them one."
            )
        states = self.prefetcher.context_hidden_states(inputs)
        context_hidden_states, final_hidden_states = self.target.split(states)
        self._guard.see(context_hidden_states, inputs, model.training)
        dtype = self._compute_dtype()
        if model.training and args.context_noise > 0:
            noise = (inputs["document_lengths"], inputs["noise_seeds"], args.context_noise, dtype)
            context_hidden_states = add_context_noise(context_hidden_states, *noise)
        context_hidden_states = context_hidden_states.to(dtype)
        selection = self._selection(model, inputs) if isinstance(config, DFlash2DraftConfig) else None
        given = (inputs, context_hidden_states, self.head, self.objective, args.loss_chunk_blocks, final_hidden_states)
        loss, sums, outputs = drafter_loss(model, config, *given, selection)
        (self._trained.step if model.training else self._evaluated.blocks).add(sums)
        if num_items_in_batch is None:
            loss = loss / self._normalizer(inputs).clamp(min=1e-12)
        else:
            # Gradients are averaged over ranks, the normaliser is summed over them.
            loss = loss * args.world_size / num_items_in_batch.clamp(min=1e-12)
        if model.training:
            loss = self._guard.marked(loss)
        return (loss, {**outputs, "context_hidden_states": context_hidden_states}) if return_outputs else loss

    def _selection(self, model: Any, inputs: dict[str, Any]) -> SelectorTerms | None:
        """What a DFlash 2 drafter's selector adds to the loss of a batch."""
        step = self.state.global_step if model.training else None
        return selector_terms(model, inputs, **self.args.selector_settings(self._drafter_config.block_size, step))

    def _compute_dtype(self) -> torch.dtype:
        """Type of the drafter's inputs: that of autocast, or of its parameters where there is none."""
        if self.args.bf16 or self.args.fp16:
            return torch.bfloat16 if self.args.bf16 else torch.float16
        return self.accelerator.unwrap_model(self.model).dtype

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The parent's step; the loss of a micro-batch that is not finite is returned as 0, its step is left out."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        return torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))

    def get_decay_parameter_names(self, model):
        """The parent's, without the codebooks of a DFlash 2 drafter, of which decay would wipe rare tokens out."""
        names = super().get_decay_parameter_names(model)
        return [name for name in names if not name.endswith(("_codebook", "base_kernel"))]

    def _get_grad_norm(self, model, grad_norm=None):
        # Trainer has the norm of the summed gradients here, in every step and before the optimizer's; no hook is
        # given it, and without it no step that is not finite would be left out.
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self._trained.end_step(self._guard.judge(grad_norm, self.state.global_step + 1))
        return grad_norm

    def _track_num_input_tokens(self, inputs):
        # The parent looks for what the drafter's forward takes, which no batch holds yet, and would count nothing.
        counted = self.args.include_num_input_tokens_seen
        if counted != "no":
            tokens = inputs["input_ids"].numel() if counted == "all" else sum(map(sum, inputs["document_lengths"]))
            self.state.num_input_tokens_seen += int(self._reduce(torch.tensor(tokens, device=self.args.device)))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Floating-point operations of the drafter on a batch, forward and backward, as the plan counts them."""
        head_weights = self.head.vocab_size * self._drafter_config.hidden_size
        compares = self.args.compares
        return int(batch_operations(self._weights, head_weights, inputs, compares).drafter)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what trackers and notebooks show of a step, and what they do not as `details` of `state.log_history`.

        A step shows the acceptance length, tokens per second and, where the target has devices of its own, the share
        of the step that the drafter waited for it: near 0 the drafter limits the step, else the target. The details,
        such as the accuracy of each slot and where the time goes, are saved with the state.
        """
        details = next((self._details.pop(name) for name in [*self._details] if name in logs), {})
        if "loss" in logs:
            details = self._training_figures(logs)
        elif "train_loss" in logs:
            # The parent adds what this rank alone has lost since the last log.
            mean = self._reduce(torch.tensor(logs["train_loss"], device=self.args.device)) / self.args.world_size
            logs["train_loss"] = mean.item()
        super().log(logs, start_time)
        if details:
            self.state.log_history[-1]["details"] = details  # type: ignore[assignment]

    def _training_figures(self, logs: dict[str, float]) -> dict[str, float]:
        """Add the figures that are shown of the steps since the last log to it, and return the others."""
        self._guard.flush()
        figures = self._trained.take(self._reduce)
        loss = figures.pop("loss")
        left_out = self._guard.take_left_out()
        if left_out:
            logs["nonfinite_steps"] = len(left_out)
            logs["loss"] = loss
        times = self.throughput.metrics()
        logs["acceptance_length"] = figures.pop("acceptance_length")
        if "tokens_per_second" in times:
            logs["tokens_per_second"] = times.pop("tokens_per_second")
            if self._is_pair:
                logs["target_wait_share"] = times["wait_seconds"] / times["step_seconds"]
        return figures | times

    def _reduce(self, values: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(values, reduction="sum")

    # Evaluation

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Loss of an evaluation batch; no logits are returned, so that none are gathered."""
        inputs = self._without_repeated_rows(self._prepare_inputs(inputs), self.args.per_device_eval_batch_size)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            if "supervised_runs" in inputs:
                context_hidden_states = outputs["context_hidden_states"]
                for answer in walk_batch(model, self._drafter_config, self.head, inputs, context_hidden_states):
                    self._evaluated.add_answer(answer)
            else:
                logger.warning_once("Without `supervised_runs` the acceptance length is that at random anchors.")
        return loss.detach(), None, None

    def evaluation_loop(  # type: ignore[override]
        self, dataloader, description, metric_key_prefix: str = "eval", **kwargs
    ) -> EvalLoopOutput:
        """The parent's loop, with loss and acceptance as ratios of sums over all blocks instead of means of means."""
        self._evaluated = EvaluationSums(self._drafter_config.block_size, self.args.device, dataloader.dataset)
        self._guard.evaluated.clear()
        self.prefetcher.wait_until_idle()
        trained = self.model_wrapped is not self.model or self.is_in_train
        # As in training, whoever evaluates.
        with varied_lengths():
            output = super().evaluation_loop(dataloader, description, metric_key_prefix=metric_key_prefix, **kwargs)
        figures = self._evaluated.metrics(self._reduce)
        self._guard.report_evaluation(figures["loss"])
        metrics = {f"{metric_key_prefix}_{name}": figures.pop(name) for name in SHOWN}
        # For the entry of the log: those of a data set that is not logged are forgotten.
        self._details = {f"{metric_key_prefix}_loss": {f"{metric_key_prefix}_{k}": v for k, v in figures.items()}}
        if not trained and self.args.world_size > 1:
            # An evaluation marks the drafter as prepared, and a later `train()` would leave it without the wrapper
            # that adds up the gradients of all ranks.
            self.accelerator._models.clear()
            self.model._is_accelerate_prepared = False
        return output._replace(metrics={**(output.metrics or {}), **metrics})

    # The run and its checkpoints

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """The parent's training, which a signal ends with a checkpoint and status 75.

        `resume_from_checkpoint` is a checkpoint, its fsspec address (or that of a folder of them), or True for the
        newest complete one of `output_dir` and `remote_checkpoint_dir`; by default what the arguments say. One of
        another drafter, target, tokenizer or data set is refused.

        Raises:
            TrainingInterrupted: SIGTERM, SIGINT or SIGHUP came; a `SystemExit` that a script passes on.
            NonFiniteTrainingError: Too many steps in a row were not finite.
            RemoteCheckpointError: Training is done, but its last checkpoint never arrived at the remote address.
            ValueError: The loss cannot fall, or the checkpoint cannot be resumed.
        """
        with writes_alone(self):
            folder = self._due_evaluation.folder = self.begin(resume_from_checkpoint)
            begin = 0 if folder is None else step_of(folder) or 0
            decided_by_main(self, lambda: set_aside(str(self.args.output_dir), begin))
            # The switch is the whole process's: were it the target's, its thread would change the drafter's kernels.
            with varied_lengths(), self._ended_in_order():
                output = super().train(None if folder is None else str(folder), *args, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])

    def learned_nothing(self) -> str | None:
        """What to say at the end of a run whose drafter drafts next to nothing, or that hardly began; else None."""
        steps = self.state.global_step
        entries = [entry.items() for entry in self.state.log_history]
        lengths = [value for items in entries for name, value in items if name.endswith("acceptance_length")]
        start = "Some 500 steps on a few thousand chats that the target answered would be a start."
        if lengths and lengths[-1] < LITTLE_ACCEPTED:
            what = (
                f"after {steps} steps its acceptance length is {lengths[-1]:.2f}, where 1 means no draft is accepted"
            )
            return f"The drafter has learned next to nothing: {what}. {start}"
        return f"Only {steps} steps ran, which teach a drafter next to nothing. {start}" if steps < FEW_STEPS else None

    def begin(self, resume_from_checkpoint: str | bool | None = None) -> Path | None:
        """What [`train`] does before its first step: check that a run can learn and be saved, and make its record.

        Returns the checkpoint that it goes on from, on every rank the same; None for a run that starts.
        """
        args = self.args
        groups = [{"lr": args.learning_rate}] if self.optimizer is None else self.optimizer.param_groups
        check_can_learn(self.model, groups, partial=is_adapter(self.model) or bool(args.trainable_modules))
        decided_by_main(self, lambda: prepare_output(args, self.model))
        parts = (self._drafter_config, self.target.model, self._tokenizer, self.train_dataset, self.recipe)
        self.run_record = run_record(args, *parts)
        folder = decided_by_main(self, lambda: resume_folder(args, self.run_record, resume_from_checkpoint))
        check_resumed_part(folder, self.accelerator.unwrap_model(self.model))
        return folder

    @contextmanager
    def _ended_in_order(self) -> Iterator[None]:
        """Around the training: signals end it with a checkpoint, and nothing that it started is left running."""
        with self._interrupts.handled():
            try:
                yield
                self._guard.finish()
                # Schedule-free optimizers step at other weights than they evaluate and leave behind.
                self.optimizer.eval()
                self._save_late()
                for mirror in self._mirrors:
                    decided_by_main(self, mirror.finish)
            except TrainingInterrupted:
                self._end_interrupted()
                raise
            finally:
                for mirror in self._mirrors:
                    mirror.close()
                self.prefetcher.close()
                self._guard.close()

    @property
    def _mirrors(self) -> list[RemoteCheckpointCallback]:
        return [c for c in self.callback_handler.callbacks if isinstance(c, RemoteCheckpointCallback)]

    def _save_late(self) -> None:
        """Write a checkpoint of a run that writes none, if a signal came behind its last step: it is passed on."""
        writes_none = self.args.save_strategy == SaveStrategy.NO and not self._interrupts.saves_last
        if writes_none and self._reduce(self._interrupts.flag(self.args.device)).item():
            self._save_checkpoint(self.model, None)

    def _end_interrupted(self) -> None:
        """What the parent does at the end of a run, which an interrupt passes over."""
        self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._finish_current_push()
        for mirror in self._mirrors:
            mirror.close()
        self.is_in_train = False
        if self.args.world_size > 1:
            # A rank that exits while another one still talks to it aborts.
            self.accelerator.wait_for_everyone()
            self.accelerator.state.destroy_process_group()

    def _save_checkpoint(self, model, trial):
        # Trainer writes under the final name, where a kill leaves half a checkpoint.
        run_dir = Path(self._get_output_dir(trial))
        self._guard.flush()
        self.optimizer.eval()
        parameter = first_nonfinite_parameter(self.model)
        if parameter is not None:
            logger.error(f"No checkpoint of step {self.state.global_step}: the drafter's {parameter} is not finite.")
            return
        record = {**self.run_record, EVALUATION_DUE: self._interrupts.evaluation_is_due}
        folder = write_checkpoint(self, run_dir, lambda aside: write_record(record, aside))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        rotate(self, run_dir)

    def _finalize_training(self, trial, num_train_samples, start_time):
        # With save_total_limit=1 the parent deletes all but the best, and with them a `checkpoint-10-keep`.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            output = super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.save_total_limit = limit
        if limit == 1 and self.state.best_model_checkpoint is not None:
            rotate(self, Path(self._get_output_dir(trial)), is_over=True)
        return output

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with warnings.catch_warnings():
            # Trainer reads the configuration as a plain one, which warns of a field that is there for older readers.
            warnings.filterwarnings("ignore", message="`rope_scaling` is deprecated", category=FutureWarning)
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint):
        # The parent lets the learning rate and weight decay of the loaded states rule over this run's arguments; no
        # hook comes between.
        with own_settings(self.optimizer, self.lr_scheduler, self.state, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    # The Hub

    def push_to_hub(  # type: ignore[override]
        self,
        commit_message="End of training",
        blocking=True,
        token=None,
        revision=None,
        private=None,
        tag=None,
        options: CardOptions | None = None,
    ):
        """Publish the drafter as others can use it at once, in one commit: bf16 weights, code, card, results, plots.

        `output_dir` keeps the fp32 masters; its `results.json` (of the acceptance) and plots are published too. An
        adapter is merged. `token`, `revision` and `private` are in place of `hub_token`, `hub_revision` and
        `hub_private_repo`, `tag` is one for the commit, and `options` are what the publisher adds to the card. Without
        `blocking` a future is returned.
        """
        return push_run(self, commit_message, blocking, token, revision, private, tag, options)

    def _push_from_checkpoint(self, checkpoint_folder):
        # The parent copies the checkpoint's fp32 weights, and pushes folders that may be rotated away meanwhile.
        push_checkpoint(self, Path(checkpoint_folder))

    def create_model_card(self, *, options: CardOptions | None = None, **kwargs) -> None:  # type: ignore[override]
        """Write the drafter's card into `output_dir`, without network; the parent's further arguments do nothing."""
        if self.is_world_process_zero():
            write_card(self, options)
