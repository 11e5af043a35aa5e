# SPDX-License-Identifier: Apache-2.0
"""`DFlashTrainer`: a transformers Trainer that runs a frozen target beside the drafter it trains."""

import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from .data.packing import PackedDataset, RowSampler
from .modeling_dflash import DFlashDraftModel
from .publishing.hub_pushes import push_checkpoint, push_run, write_card
from .publishing.model_card import CardOptions
from .publishing.training_facts import TrainingFacts
from .runs.checkpointing import decided_by_main, write_checkpoint
from .runs.guards import StepGuard, check_can_learn, first_nonfinite_parameter
from .runs.interrupts import Interrupts, TrainingInterrupted, spare_workers
from .runs.output_lock import writes_alone
from .runs.record import run_record, write_record
from .runs.remote_checkpoints import RemoteCheckpointCallback
from .runs.resumed_state import EVALUATION_DUE, DueEvaluation, GivenSettings, check_steps_left, tell_of_schedule
from .runs.resuming import prepare_output, resume_folder
from .runs.rotation import rotate
from .target.frozen_target import FrozenTarget
from .target.head import FrozenHead
from .target.pairs import PairCallback, make_pair, pair_accelerator_args
from .target.startup_times import StartupCallback
from .training.adapting import check_continuing
from .training.batches import SetEpoch, data_seed, make_collator, pack_rows, without_repeated_rows
from .training.context_noise import add_context_noise
from .training.drafter_loss import drafter_loss
from .training.evaluation import EvaluationSums
from .training.losses import BlockSums, Objective, make_objective
from .training.model_preparation import compile_layers, frozen_target, load_drafter, prepare_drafter
from .training.optimizers import muon_with_adamw
from .training.partial_training import check_resumed_part, is_adapter, make_trainable
from .training_args import DFlashTrainingArguments


logger = logging.get_logger(__name__)


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
        drafter = self._prepare_models(drafter, target_model, peft_config)
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

    def _prepare_models(self, drafter: Any, target_model: Any, peft_config: Any) -> Any:
        """The target and its head, and the drafter or the part of it that is trained."""
        args, config = self.args, self._drafter_config
        self.objective = make_objective(
            args.objective,
            config.block_size,
            args.loss_gamma,
            args.dpace_alpha,
            args.slot_weights,
            args.loss_temperature,
            args.cross_entropy_share,
        )
        compares = self.objective.slot_terms.divergence is not None
        self.target = frozen_target(target_model, config.target_layer_ids, args, compares)
        check_continuing(config, self.target, self._tokenizer)
        self.head = FrozenHead(self.target.model, args.device)
        # A frozen drafter under autocast needs no fp32 masters.
        frozen = is_adapter(drafter) or peft_config is not None
        prepare_drafter(drafter, args, keep_dtype=frozen and (args.bf16 or args.fp16))
        return make_trainable(drafter, peft_config, args.trainable_modules, args.seed)

    def _watch(self, drafter: Any) -> None:
        """The sums that become metrics, and the callbacks, in the order in which they are called."""
        args, block_size = self.args, self._drafter_config.block_size
        self._num_parameters = sum(p.numel() for p in drafter.parameters())
        self._train_sums = BlockSums.zeros(block_size, args.device)
        self._step_sums = BlockSums.zeros(block_size, args.device)
        self._evaluated = EvaluationSums(block_size, args.device)
        self.prefetcher, self.throughput = make_pair(self.target, args)
        self._guard = StepGuard(drafter, args.max_nonfinite_steps, scaled=self.accelerator.scaler is not None)
        self._interrupts = Interrupts(args.world_size)
        self._due_evaluation = DueEvaluation(self)
        self.add_callback(PairCallback(self.throughput, lambda: self.model_wrapped))
        self.add_callback(StartupCallback(self))
        self.add_callback(TrainingFacts(self))
        self.add_callback(self._guard)
        self.add_callback(self._interrupts)
        self.add_callback(self._due_evaluation)
        if args.remote_checkpoint_dir is not None:
            self.add_callback(RemoteCheckpointCallback(args.remote_checkpoint_dir))

    def _pack(self, data: Any) -> PackedDataset | None:
        config, vocab_size = self._drafter_config, self.head.vocab_size
        return pack_rows(data, self.args, config, self.target, vocab_size, self._tokenizer)

    def get_eval_dataloader(self, eval_dataset=None):
        """The parent's dataloader; data given to `evaluate` may be chats or documents, as in the constructor."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._pack(eval_dataset)
        return spare_workers(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset):
        """The parent's dataloader; data given to `predict` may be chats or documents, as in the constructor."""
        return super().get_test_dataloader(self._pack(test_dataset))  # type: ignore[arg-type]

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

    @writes_alone
    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """The parent's training, which a signal ends with a checkpoint and status 75.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint, its fsspec address (or that of a folder of them), or True for the newest complete one of
                `output_dir` and `remote_checkpoint_dir`. One of another drafter, target, tokenizer or data set is
                refused.
            *args: Further arguments of [`~transformers.Trainer.train`].
            **kwargs: The same.

        Raises:
            TrainingInterrupted: SIGTERM or SIGINT came; a `SystemExit` that a script passes on.
            NonFiniteTrainingError: Too many steps in a row were not finite.
            RemoteCheckpointError: Training is done, but its last checkpoint never arrived at the remote address.
            ValueError: The loss cannot fall, or the checkpoint cannot be resumed.
        """
        groups = [{"lr": self.args.learning_rate}] if self.optimizer is None else self.optimizer.param_groups
        assert self.model is not None
        partial = is_adapter(self.model) or bool(self.args.trainable_modules)
        check_can_learn(self.model, groups, partial)
        decided_by_main(self, lambda: prepare_output(self))
        self.run_record = run_record(self)
        folder = decided_by_main(self, lambda: resume_folder(self, resume_from_checkpoint))
        check_resumed_part(folder, self.accelerator.unwrap_model(self.model))
        self._due_evaluation.folder = folder
        self._interrupts.install()
        try:
            output = super().train(None if folder is None else str(folder), *args, **kwargs)
            self._guard.finish()
            for mirror in self._mirrors():
                decided_by_main(self, mirror.finish)
        except TrainingInterrupted:
            self._end_interrupted()
            raise
        finally:
            for mirror in self._mirrors():
                mirror.close()
            self.prefetcher.close()
            self._guard.close()
            self._interrupts.remove()
        self._interrupts.pass_on()
        return output

    def _mirrors(self) -> list[RemoteCheckpointCallback]:
        return [c for c in self.callback_handler.callbacks if isinstance(c, RemoteCheckpointCallback)]

    def _end_interrupted(self) -> None:
        self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._finish_current_push()
        for mirror in self._mirrors():
            mirror.close()
        self.is_in_train = False
        if self.args.world_size > 1:
            # A rank that exits while another one still talks to it aborts.
            self.accelerator.wait_for_everyone()
            self.accelerator.state.destroy_process_group()

    def _save_checkpoint(self, model, trial):
        # Trainer writes under the final name, where a kill leaves half a checkpoint.
        self._guard.flush()
        assert self.model is not None
        parameter = first_nonfinite_parameter(self.model)
        if parameter is not None:
            logger.error(f"No checkpoint of step {self.state.global_step}: the drafter's {parameter} is not finite.")
            return
        run_dir = Path(self._get_output_dir(trial))
        record = {**self.run_record, EVALUATION_DUE: self._interrupts.evaluation_is_due}
        folder = write_checkpoint(self, run_dir, lambda aside: write_record(record, aside))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        rotate(self, run_dir)

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

    def create_model_card(self, *, options: CardOptions | None = None, **kwargs) -> None:  # type: ignore[override]
        """Write the drafter's card into `output_dir`; needs no network.

        Args:
            options: As for [`push_to_hub`].
            **kwargs: Only for compatibility with the parent; what they say is known already.
        """
        if self.is_world_process_zero():
            write_card(self, options)

    def _push_from_checkpoint(self, checkpoint_folder):
        # The parent copies the checkpoint's fp32 weights, and pushes folders that may be rotated away meanwhile.
        push_checkpoint(self, Path(checkpoint_folder))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with warnings.catch_warnings():
            # Trainer reads the configuration as a plain one, which warns of a field that is there for older readers.
            warnings.filterwarnings("ignore", message="`rope_scaling` is deprecated", category=FutureWarning)
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint):
        # The parent lets the learning rate and weight decay of the loaded states rule over this run's arguments; no
        # hook comes between.
        if checkpoint is not None:
            check_steps_left(Path(checkpoint), self.state.max_steps)
        if checkpoint is None or self.is_deepspeed_enabled:
            return super()._load_optimizer_and_scheduler(checkpoint)
        assert self.optimizer is not None
        given = GivenSettings(self.optimizer, self.lr_scheduler)
        super()._load_optimizer_and_scheduler(checkpoint)
        rates = given.put_back(self.optimizer, self.lr_scheduler)
        if self.is_world_process_zero():
            tell_of_schedule(Path(checkpoint), self.state.max_steps, rates)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The parent's step; the loss of a micro-batch that is not finite is returned as 0, its step is left out."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        return torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))

    def _get_grad_norm(self, model, grad_norm=None):
        # Trainer has the norm of the summed gradients here, in every step and before the optimizer's; no hook is
        # given it.
        grad_norm = super()._get_grad_norm(model, grad_norm)
        left_out = self._guard.judge(grad_norm, self.state.global_step + 1)
        sums = self._step_sums.values
        self._train_sums.values += torch.where(left_out, torch.zeros_like(sums), sums)
        sums.zero_()
        return grad_norm

    def get_train_dataloader(self):
        """The parent's dataloader, whose batches stay on the host until the prefetcher sends them where they go."""
        dataloader: Any = super().get_train_dataloader()
        dataloader.device = None
        return spare_workers(dataloader)

    def _build_accelerator_args(self, **kwargs):
        return pair_accelerator_args(super()._build_accelerator_args(**kwargs), self.args)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Collect the micro-batches of one optimizer step and what the step's loss is divided by, over all ranks."""
        if self.state.global_step >= self.state.max_steps:
            # Resumed from the last checkpoint of a finished run, where Trainer would take one step more.
            return [], None
        epoch_iterator = self.prefetcher.look_ahead(epoch_iterator, self.accelerator.gradient_state)
        batch_samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batch_samples:
            batch_samples[-1] = without_repeated_rows(
                batch_samples[-1], self.accelerator.gradient_state, self.args, self.args.train_batch_size
            )
        total = torch.zeros((), device=device)
        for batch in batch_samples:
            total = total + self.objective.normalizer(batch["labels"][..., 1:] != -100).to(device)
        # Whether a signal came travels with the normaliser, so that all ranks stop at the same step.
        totals = torch.stack([total, self._interrupts.flag(device)])
        total, interrupted = self.accelerator.reduce(totals, reduction="sum")
        self._interrupts.agree(interrupted)
        return batch_samples, total

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
        labels = inputs["labels"]
        if labels.shape[-1] != config.block_size:
            raise ValueError(
                f"The collator makes blocks of {labels.shape[-1]} slots, the drafter's block_size is "
                f"{config.block_size}. Give both the same, or leave data_collator out."
            )
        context, final = self._split(self.prefetcher.context_hidden_states(inputs))
        self._guard.see(context, inputs["documents"], inputs["document_lengths"], model.training)
        dtype = self._compute_dtype
        if model.training and self.args.context_noise > 0:
            context = add_context_noise(
                context, inputs["document_lengths"], inputs["noise_seeds"], self.args.context_noise, dtype
            )
        context = context.to(dtype)
        loss, sums, outputs = drafter_loss(
            model,
            config,
            inputs,
            context,
            self.head,
            self.objective,
            self.args.loss_chunk_blocks,
            final,
        )
        (self._step_sums if model.training else self._evaluated.blocks).add(sums)
        if num_items_in_batch is None:
            normalizer = self.objective.normalizer(labels[..., 1:] != -100)
            loss = loss / normalizer.clamp(min=1e-12)
        else:
            # Gradients are averaged over ranks, the normaliser is summed over them.
            loss = loss * self.args.world_size / num_items_in_batch.clamp(min=1e-12)
        if model.training:
            loss = self._guard.marked(loss)
        return (loss, {**outputs, "context_hidden_states": context}) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Loss of an evaluation batch; no logits are returned, so that none are gathered."""
        inputs = without_repeated_rows(
            self._prepare_inputs(inputs),
            self.accelerator.gradient_state,
            self.args,
            self.args.per_device_eval_batch_size,
        )
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
        output = super().evaluation_loop(dataloader, description, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = self._evaluated.metrics(self._reduce)
        self._guard.report_evaluation(metrics["loss"])
        metrics = {f"{metric_key_prefix}_{k}": v for k, v in metrics.items()}
        if not trained and self.args.world_size > 1:
            # Preparing for evaluation marks the drafter as prepared, and a later train() would leave it without the
            # wrapper that adds up the gradients of all ranks.
            self.accelerator._models.clear()
            self.model._is_accelerate_prepared = False  # type: ignore[union-attr]
        return output._replace(metrics={**(output.metrics or {}), **metrics})

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the acceptance and accuracies of the blocks trained on since the last log."""
        if "loss" in logs:
            self._guard.flush()
            reduced = BlockSums(self._reduce(self._train_sums.values.clone()))
            metrics = reduced.metrics()
            self._train_sums.values.zero_()
            left_out = self._guard.take_left_out()
            if left_out:
                logs["nonfinite_steps"] = len(left_out)
                logs["loss"] = metrics["loss"] if reduced.values[1] > 0 else float("nan")
            logs.update({k: metrics[k] for k in ("acceptance_length", "accuracy", "full_blocks")})
            logs.update(self.throughput.metrics())
        super().log(logs, start_time)

    @property
    def _compute_dtype(self) -> torch.dtype:
        """Type of the drafter's inputs: that of autocast, or of its parameters where there is none."""
        if self.args.bf16 or self.args.fp16:
            return torch.bfloat16 if self.args.bf16 else torch.float16
        return self.accelerator.unwrap_model(self.model).dtype

    def _split(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The context, and the target's final states where the objective compares with its distribution."""
        if not self.target.final_states:
            return states, None
        width = self._drafter_config.hidden_size
        return states[..., :-width], states[..., -width:]

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Floating-point operations of the drafter on the blocks, forward and backward, without attention and head."""
        return 6 * self._num_parameters * inputs["labels"].numel()

    def _reduce(self, values: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(values, reduction="sum")


__all__ = ["DFlashTrainer", "add_context_noise", "compile_layers"]
