# SPDX-License-Identifier: Apache-2.0
"""`DFlashTrainer`: a transformers Trainer that runs a frozen target beside the drafter it trains."""

import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from .data.packing import PackedDataset, RowSampler
from .modeling_dflash import DFlashDraftModel
from .publishing.hub_pushes import push_checkpoint, push_run, write_card
from .publishing.model_card import CardOptions
from .publishing.training_facts import TrainingFacts
from .runs.guards import StepGuard
from .runs.interrupts import Interrupts, spare_workers
from .runs.lifecycle import begin, ended_in_order, save
from .runs.operations import batch_operations, drafter_weights
from .runs.output_lock import writes_alone
from .runs.remote_checkpoints import RemoteCheckpointCallback
from .runs.resumed_state import DueEvaluation, own_settings
from .runs.rotation import rotate
from .target.frozen_target import FrozenTarget
from .target.pairs import PairCallback, make_pair, pair_accelerator_args
from .target.startup_times import StartupCallback
from .target.varied_lengths import varied_lengths
from .training.batches import (
    SetEpoch,
    check_blocks,
    count_tokens,
    data_seed,
    make_collator,
    pack_rows,
    without_repeated_rows,
)
from .training.context_noise import add_context_noise
from .training.drafter_loss import drafter_loss
from .training.losses import IGNORE_INDEX
from .training.metric_sums import EvaluationSums, TrainingSums
from .training.model_preparation import compile_layers, compute_dtype, forget_preparation, load_drafter, prepare_models
from .training.objectives import Objective, objective_of
from .training.optimizers import muon_with_adamw
from .training_args import DFlashTrainingArguments


class DFlashTrainer(Trainer):
    r"""
    Trains a drafter on the hidden states of a frozen target, computed as they are needed.

    Args:
        model (`DFlashDraftModel` or `str`):
            The drafter, or the folder or Hub id of one to continue. Its parameters are kept in fp32.
        target_model (`str`, `PreTrainedModel` or `FrozenTarget`):
            The target, by Hub id, folder or loaded. It is frozen and belongs to no checkpoint.
        args (`DFlashTrainingArguments`, *optional*):
            Arguments.
        data_collator (*optional*):
            Makes batches of packed rows; a [`DataCollatorForDFlash`] by default.
        train_dataset, eval_dataset (`datasets.Dataset`, `list[dict]` or `PackedDataset`, *optional*):
            Chats (`messages`), documents (`input_ids`, `supervised_spans`) or packed rows of them; a folder of either
            is opened by [`load_documents`].
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The target's tokenizer; needed for chats.
        peft_config (`peft.PeftConfig`, *optional*):
            Train an adapter, saved without the drafter, in place of its weights; without `target_modules`, of all
            matrices. [`drafter_adapters.lora_config`] makes one, [`drafter_adapters.merge_adapter`] the new drafter.
        recipe (`dict`, *optional*):
            What a script was started with, as JSON; written into every checkpoint's `dflash_run.json`.
        **kwargs:
            Further arguments of [`~transformers.Trainer`].

    Raises:
        ValueError: When drafter, target and data do not fit together, or nothing in the data can be learned from.
    """

    args: DFlashTrainingArguments
    objective: Objective
    # The loss is normalised over the whole optimizer step before it reaches the parent.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: "DFlashDraftModel | str | Path",
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
        args = args if args is not None else DFlashTrainingArguments(output_dir="tmp_trainer")
        drafter = load_drafter(model, args, kwargs)
        self.args, self.recipe, self._drafter_config = args, recipe, drafter.config
        self._tokenizer = processing_class if isinstance(processing_class, PreTrainedTokenizerBase) else None
        self.objective = objective_of(args, drafter.config.block_size)
        drafter, self.target, self.head = prepare_models(drafter, target_model, args, self._tokenizer, peft_config)
        if isinstance(eval_dataset, dict) and not isinstance(eval_dataset, DatasetDict):
            eval_dataset = {name: self._pack(data) for name, data in eval_dataset.items()}
        else:
            eval_dataset = self._pack(eval_dataset)
        train_dataset = self._pack(train_dataset)
        if data_collator is None:
            rows = train_dataset or (None if isinstance(eval_dataset, dict) else eval_dataset)
            data_collator = make_collator(rows, args, self._drafter_config.block_size)
        if args.muon:
            kwargs.setdefault("optimizer_cls_and_kwargs", muon_with_adamw(args))
        super().__init__(
            model=drafter,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        self._watch(drafter)

    def _watch(self, drafter: Any) -> None:
        """The sums that become metrics, and the callbacks, in the order in which they are called."""
        args, block_size = self.args, self._drafter_config.block_size
        self._weights = drafter_weights(drafter)
        self._trained = TrainingSums(block_size, args.device)
        self._evaluated = EvaluationSums(block_size, args.device)
        self.prefetcher, self.throughput = make_pair(self.target, args)
        self._guard = StepGuard(drafter, args.max_nonfinite_steps, scaled=self.accelerator.scaler is not None)
        self._interrupts = Interrupts(args.world_size)
        self._due_evaluation = DueEvaluation(self)
        callbacks: list[TrainerCallback] = [
            PairCallback(self.throughput, lambda: self.model_wrapped),
            StartupCallback(self),
        ]
        callbacks += [TrainingFacts(self), self._guard, self._interrupts, self._due_evaluation]
        if args.remote_checkpoint_dir is not None:
            callbacks.append(RemoteCheckpointCallback(args.remote_checkpoint_dir))
        for callback in callbacks:
            self.add_callback(callback)

    def _pack(self, data: Any) -> PackedDataset | None:
        config, vocab_size = self._drafter_config, self.head.vocab_size
        return pack_rows(data, self.args, config, self.target, vocab_size, self._tokenizer)

    def _build_accelerator_args(self, **kwargs):
        return pair_accelerator_args(super()._build_accelerator_args(**kwargs), self.args)

    # Batches

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
        sampler = RowSampler(len(dataset), seed=data_seed(self.args))
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
            total = total + self.objective.normalizer(batch["labels"][..., 1:] != IGNORE_INDEX).to(device)
        # Whether a signal came travels with the normaliser, so that all ranks stop at the same step.
        totals = torch.stack([total, self._interrupts.flag(device)])
        total, interrupted = self.accelerator.reduce(totals, reduction="sum")
        self._interrupts.agree(interrupted)
        return batch_samples, total

    def _without_repeated_rows(self, inputs: dict[str, Any], rows_per_rank: int) -> dict[str, Any]:
        return without_repeated_rows(inputs, self.accelerator.gradient_state, self.args, rows_per_rank)

    # Steps

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Run the target, then the drafter, then the loss through the frozen head.

        Args:
            model: The drafter, possibly wrapped for distributed training.
            inputs: A batch of [`DataCollatorForDFlash`].
            return_outputs: Whether to return the drafter's output too, and the context that it read.
            num_items_in_batch: Normaliser of the whole optimizer step over all ranks; None for this batch's own.

        Returns:
            The loss of this micro-batch, whose sum over the optimizer step (mean over ranks) is the step's loss.
        """
        config: Any = self._drafter_config  # checked: none of its own fields is None
        check_blocks(inputs, config.block_size)
        context, final = self.target.split(self.prefetcher.context_hidden_states(inputs))
        self._guard.see(context, inputs["documents"], inputs["document_lengths"], model.training)
        dtype = compute_dtype(self.args, self.accelerator.unwrap_model(self.model))
        if model.training and self.args.context_noise > 0:
            noise = (inputs["document_lengths"], inputs["noise_seeds"], self.args.context_noise, dtype)
            context = add_context_noise(context, *noise)
        context = context.to(dtype)
        loss, sums, outputs = drafter_loss(
            model, config, inputs, context, self.head, self.objective, self.args.loss_chunk_blocks, final
        )
        (self._trained if model.training else self._evaluated.blocks).add(sums)
        if num_items_in_batch is None:
            normalizer = self.objective.normalizer(inputs["labels"][..., 1:] != IGNORE_INDEX)
            loss = loss / normalizer.clamp(min=1e-12)
        else:
            # Gradients are averaged over ranks, the normaliser is summed over them.
            loss = loss * self.args.world_size / num_items_in_batch.clamp(min=1e-12)
        if model.training:
            loss = self._guard.marked(loss)
        return (loss, {**outputs, "context_hidden_states": context}) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The parent's step; the loss of a micro-batch that is not finite is returned as 0, its step is left out."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        return torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))

    def _get_grad_norm(self, model, grad_norm=None):
        # Trainer has the norm of the summed gradients here, in every step and before the optimizer's; no hook is
        # given it.
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self._trained.end_step(self._guard.judge(grad_norm, self.state.global_step + 1))
        return grad_norm

    def _track_num_input_tokens(self, inputs):
        # The parent looks for what the drafter's forward takes, which no batch holds yet.
        counted = str(self.args.include_num_input_tokens_seen)
        self.state.num_input_tokens_seen += count_tokens(inputs, counted, self.args.device, self._reduce)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Floating-point operations of the drafter on a batch, forward and backward, as the plan counts them."""
        head_weights = self.head.vocab_size * self._drafter_config.hidden_size
        compares = self.objective.slot_terms.divergence is not None
        return int(batch_operations(self._weights, head_weights, inputs, compares).drafter)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the acceptance and accuracies of the blocks trained on since the last log."""
        if "loss" in logs:
            self._guard.flush()
            metrics = self._trained.take(self._reduce)
            left_out = self._guard.take_left_out()
            if left_out:
                logs["nonfinite_steps"] = len(left_out)
                logs["loss"] = metrics["loss"]
            logs.update({k: metrics[k] for k in ("acceptance_length", "accuracy", "full_blocks")})
            logs.update(self.throughput.metrics())
        super().log(logs, start_time)

    def _reduce(self, values: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(values, reduction="sum")

    # Evaluation

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Loss of an evaluation batch; no logits are returned, so that none are gathered."""
        inputs = self._without_repeated_rows(self._prepare_inputs(inputs), self.args.per_device_eval_batch_size)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            context = outputs["context_hidden_states"]
            self._evaluated.walk_answers(model, self._drafter_config, self.head, inputs, context)
        return loss.detach(), None, None

    def evaluation_loop(  # type: ignore[override]
        self, dataloader, description, metric_key_prefix: str = "eval", **kwargs
    ) -> EvalLoopOutput:
        """The parent's loop, with loss and acceptance as ratios of sums over all blocks instead of means of means."""
        self._evaluated.restart(dataloader.dataset)
        self._guard.evaluated.clear()
        self.prefetcher.wait_until_idle()
        trained = self.model_wrapped is not self.model or self.is_in_train
        # As in training, whoever evaluates.
        with varied_lengths():
            output = super().evaluation_loop(dataloader, description, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = self._evaluated.metrics(self._reduce)
        self._guard.report_evaluation(metrics["loss"])
        metrics = {f"{metric_key_prefix}_{k}": v for k, v in metrics.items()}
        if not trained and self.args.world_size > 1:
            forget_preparation(self)
        return output._replace(metrics={**(output.metrics or {}), **metrics})

    # The run and its checkpoints

    @writes_alone
    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """The parent's training, which a signal ends with a checkpoint and status 75.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint, its fsspec address (or that of a folder of them), or True for the newest complete one of
                `output_dir` and `remote_checkpoint_dir`; by default what the arguments say. One of another drafter,
                target, tokenizer or data set is refused.
            *args: Further arguments of [`~transformers.Trainer.train`].
            **kwargs: The same.

        Raises:
            TrainingInterrupted: SIGTERM, SIGINT or SIGHUP came; a `SystemExit` that a script passes on.
            NonFiniteTrainingError: Too many steps in a row were not finite.
            RemoteCheckpointError: Training is done, but its last checkpoint never arrived at the remote address.
            ValueError: The loss cannot fall, or the checkpoint cannot be resumed.
        """
        folder = self._due_evaluation.folder = begin(self, resume_from_checkpoint)
        # The switch is the whole process's. Were it the target's alone, its thread would change the drafter's kernels.
        with varied_lengths(), ended_in_order(self):
            return super().train(None if folder is None else str(folder), *args, **kwargs)

    def _save_checkpoint(self, model, trial):
        # Trainer writes under the final name, where a kill leaves half a checkpoint.
        run_dir = Path(self._get_output_dir(trial))
        folder = save(self, run_dir)
        if folder is None:
            return
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        rotate(self, run_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with warnings.catch_warnings():
            # Trainer reads the configuration as a plain one, which warns of a field that is there for older readers.
            warnings.filterwarnings("ignore", message="`rope_scaling` is deprecated", category=FutureWarning)
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint):
        # The parent lets the learning rate and weight decay of the loaded states rule over this run's arguments; no
        # hook comes between.
        with own_settings(self, checkpoint):
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
        """Publish the drafter as others can use it at once: bf16 weights, code, card, results, plots.

        All come in one commit. `output_dir` keeps the fp32 masters; its `results.json` (of the acceptance) and plots
        are published too. An adapter is merged.

        Args:
            commit_message: First line of the commit.
            blocking: Whether to wait; otherwise a future is returned.
            token, revision, private: In place of `hub_token`, `hub_revision` and `hub_private_repo`.
            tag: Tag of the commit.
            options: What the publisher adds to the card, such as base model and licence.
        """
        return push_run(self, commit_message, blocking, token, revision, private, tag, options)

    def _push_from_checkpoint(self, checkpoint_folder):
        # The parent copies the checkpoint's fp32 weights, and pushes folders that may be rotated away meanwhile.
        push_checkpoint(self, Path(checkpoint_folder))

    def create_model_card(self, *, options: CardOptions | None = None, **kwargs) -> None:  # type: ignore[override]
        """Write the drafter's card into `output_dir`; needs no network.

        Args:
            options: As for [`push_to_hub`].
            **kwargs: Only for compatibility with the parent; what they say is known already.
        """
        if self.is_world_process_zero():
            write_card(self, options)


__all__ = ["DFlashTrainer", "add_context_noise", "compile_layers"]
