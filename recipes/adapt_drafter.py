# SPDX-License-Identifier: Apache-2.0
"""Adapt a published drafter to one's own traffic, or to a quantised or fine-tuned target, by a small adapter.

    python recipes/adapt_drafter.py --drafter FOLDER_OR_ID --target FOLDER_OR_ID --documents FOLDER [--field value ...]

`documents` is a folder that `dflash-hf tokenize` wrote, or a file of completions. `output_dir` gets the
adapter and checkpoints, `output_dir/merged` the new drafter in the plain format, and `adaptation.json` the acceptance
on the evaluation documents before and after.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, set_seed

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.adapting import check_part, plain_drafter
from dflash_hf.callbacks import end_together
from dflash_hf.cli import errors_in_one_line, parse_config, refuse_unused
from dflash_hf.documents import read_manifest
from dflash_hf.model_card import FACTS_NAME, read_facts
from dflash_hf.trainer import documents_reader
from dflash_hf.training_args import check_scripted


CONFIG = Path(__file__).resolve().parent / "adapt.yaml"


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


def main() -> None:
    adapt, args = parse_config(
        (AdaptArguments, DFlashTrainingArguments), default_config=CONFIG, description=__doc__.split("\n")[0]
    )
    with errors_in_one_line():
        check_scripted(args, adapt.eval_documents is not None or read_manifest(adapt.documents) is not None)
        if args.trainable_modules is not None or adapt.lora_rank == 0:
            refuse_unused(adapt, ("lora_alpha", "lora_modules"), "without an adapter")
    set_seed(args.seed)
    with end_together():
        run(adapt, args)


def run(adapt: AdaptArguments, args: DFlashTrainingArguments) -> None:
    """Evaluate, train, evaluate, merge, save."""
    with errors_in_one_line():
        drafter = DFlashDraftModel.from_pretrained(adapt.drafter)
        peft_config = adapter_of(adapt, args)
        check_part(drafter, peft_config, args.trainable_modules)
        warn_of_another_objective(adapt.drafter, args.objective)
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
    before = trainer.evaluate() if eval_documents is not None else None
    trainer.train()
    trainer.save_model()
    after = trainer.evaluate() if eval_documents is not None else None
    if args.process_index == 0:
        save_merged(trainer, Path(args.output_dir))
        report(before, after, Path(args.output_dir))


def adapter_of(adapt: AdaptArguments, args: DFlashTrainingArguments) -> Any:
    """The configuration of the adapter, or None where the drafter itself is trained."""
    if adapt.lora_rank == 0 or args.trainable_modules is not None:
        return None
    # Needs peft, which training the drafter itself does not.
    from dflash_hf.adapters import lora_config

    modules = {} if adapt.lora_modules is None else {"target_modules": adapt.lora_modules}
    return lora_config(adapt.lora_rank, adapt.lora_alpha, **modules)


def warn_of_another_objective(drafter: str, objective: str) -> None:
    """Say so where a folder's drafter was trained by another objective, which costs it what it drafts otherwise."""
    facts = read_facts(drafter)
    # What is not told there is the default.
    own = objective if facts is None else facts["recipe"].get("objective", DFlashTrainingArguments.objective)
    if own != objective:
        print(
            f"{drafter} was trained by the objective {own}, and is adapted by {objective}: it may draft less of what "
            f"the documents lack. `--objective {own}` goes on as it was trained."
        )


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
    print("There is no evaluation split (dflash-hf tokenize --eval_fraction): nothing is measured here.")
    return documents(adapt.documents), None


def save_merged(trainer: DFlashTrainer, folder: Path) -> None:
    """The new drafter as servers load it, with what the run knows of itself."""
    merged = plain_drafter(trainer.accelerator.unwrap_model(trainer.model))
    merged.save_pretrained(folder / "merged", dtype=torch.bfloat16)
    shutil.copy(folder / FACTS_NAME, folder / "merged")


def report(before: dict[str, Any] | None, after: dict[str, Any] | None, folder: Path) -> None:
    """Print the acceptance before and after and write both down."""
    if before is not None and after is not None:
        (folder / "adaptation.json").write_text(json.dumps({"before": before, "after": after}, indent=1) + "\n")
        print("\n| on the evaluation documents | before | after |\n|---|---|---|")
        for name, label in (("eval_acceptance_length", "acceptance length"), ("eval_loss", "loss")):
            print(f"| {label} | {before[name]:.3f} | {after[name]:.3f} |")
    merged = folder / "merged"
    print(f"\nThe new drafter is in {merged}; next: dflash-hf evaluate --drafters {merged}")


if __name__ == "__main__":
    main()
