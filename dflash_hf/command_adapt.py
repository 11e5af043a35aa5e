# SPDX-License-Identifier: Apache-2.0
"""Adapt a published drafter to one's own traffic, or to a quantised or fine-tuned target, by a small adapter.

    dflash-hf adapt --drafter FOLDER_OR_ID --target FOLDER_OR_ID --documents FOLDER [--field value ...]

`documents` is a folder that `dflash-hf tokenize` wrote, or a file of completions. `output_dir` gets the adapter and
checkpoints, `output_dir/merged` the new drafter in the plain format, and `adaptation.json` the acceptance on the
evaluation documents before and after.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, set_seed

from .adapting import check_part, plain_drafter
from .callbacks import end_together
from .cli import errors_in_one_line, parse_config, refuse_unused
from .documents import read_manifest
from .model_card import FACTS_NAME
from .modeling_dflash import DFlashDraftModel
from .publishing import check_push
from .trainer import DFlashTrainer, documents_reader, settle_objective
from .training_args import DFlashTrainingArguments, check_scripted


CONFIG = Path(__file__).with_name("adapt.yaml")


@dataclass
class AdaptArguments:
    drafter: str = field(metadata={"help": "Hub id or folder of the drafter to adapt."})
    target: str = field(metadata={"help": "Hub id or folder of the target, the one that will serve."})
    documents: str = field(metadata={"help": "Folder of documents, or a file or folder of completions."})
    eval_documents: str | None = field(
        default=None, metadata={"help": "The same to evaluate on; by default the evaluation split of documents."}
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapter; 0 trains the drafter itself."})
    lora_alpha: int | None = field(default=None, metadata={"help": "Scale of the adapter; twice the rank."})
    lora_modules: list[str] | None = field(
        default=None, metadata={"help": "Matrices that the adapter changes; by default all of the drafter."}
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate, train, evaluate, merge, save."""
    classes, description = (AdaptArguments, DFlashTrainingArguments), (__doc__ or "").split("\n")[0]
    with errors_in_one_line("dflash-hf adapt"):
        adapt, args = parse_config(classes, argv, CONFIG, description=description, prog="dflash-hf adapt")
        check_scripted(args, adapt.eval_documents is not None or read_manifest(adapt.documents) is not None)
        if args.trainable_modules is not None:
            adapt.lora_rank = 0
        if adapt.lora_rank == 0:
            refuse_unused(adapt, ("lora_alpha", "lora_modules"), "without an adapter")
    set_seed(args.seed)
    with end_together():
        with errors_in_one_line("dflash-hf adapt"):
            trainer, has_evaluation = make_trainer(adapt, args)
        before = trainer.evaluate() if has_evaluation else None
        trainer.train()
        trainer.save_model()
        after = trainer.evaluate() if has_evaluation else None
        if args.process_index == 0:
            report(trainer, before, after)


def make_trainer(adapt: AdaptArguments, args: DFlashTrainingArguments) -> tuple[DFlashTrainer, bool]:
    """The trainer, and whether it has documents to evaluate on; what cannot be shows before the target is loaded."""
    check_push(args)
    settle_objective(args, adapt.drafter)
    drafter = DFlashDraftModel.from_pretrained(adapt.drafter)
    peft_config = None
    if adapt.lora_rank:
        from .adapters import lora_config  # needs peft

        modules = {} if adapt.lora_modules is None else {"target_modules": adapt.lora_modules}
        peft_config = lora_config(adapt.lora_rank, adapt.lora_alpha, **modules)
    check_part(drafter, peft_config, args.trainable_modules)
    tokenizer = AutoTokenizer.from_pretrained(adapt.target)
    train_documents, eval_documents = read_documents(adapt, args, tokenizer)
    trainer = DFlashTrainer(
        drafter,
        adapt.target,
        args,
        train_dataset=train_documents,
        eval_dataset=eval_documents,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    if args.resume_from_checkpoint:
        # A checkpoint of something else shows before the drafter is measured.
        trainer.begin()
    return trainer, eval_documents is not None


def read_documents(
    adapt: AdaptArguments, args: DFlashTrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset, Dataset | None]:
    """Documents to train on and to evaluate on."""
    documents = documents_reader(args, adapt.target, tokenizer)
    manifest = read_manifest(adapt.documents)
    if adapt.eval_documents is not None:
        return documents(adapt.documents), documents(adapt.eval_documents)
    if manifest and manifest["documents"].get("eval"):
        return documents(adapt.documents), documents(adapt.documents, split="eval")
    print("There is no evaluation split (dflash-hf tokenize --eval_fraction 0.1), so the gain is not measured here.")
    return documents(adapt.documents), None


def report(trainer: DFlashTrainer, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
    """Save the new drafter as servers load it, with what the run knows of itself; tell the acceptance."""
    folder = Path(str(trainer.args.output_dir))
    merged = folder / "merged"
    plain_drafter(trainer.accelerator.unwrap_model(trainer.model)).save_pretrained(merged, dtype=torch.bfloat16)
    shutil.copy(folder / FACTS_NAME, merged)
    if before is not None and after is not None:
        (folder / "adaptation.json").write_text(json.dumps({"before": before, "after": after}, indent=1) + "\n")
        print("\n| on the evaluation documents | before | after |\n|---|---|---|")
        for name, label in (("eval_acceptance_length", "acceptance length"), ("eval_loss", "loss")):
            print(f"| {label} | {before[name]:.3f} | {after[name]:.3f} |")
    print(f"\nThe new drafter is in {merged}; next: dflash-hf evaluate --drafters {merged} ...")
