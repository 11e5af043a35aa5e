# SPDX-License-Identifier: Apache-2.0
"""What the demo's acts share: target, chats, and the way from a drafter to what training has made of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from demo_report import Act, spread
from get_target import get_smollm2
from remembering_target import RememberingTarget
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf import (
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    read_completions,
    tokenize_completions,
)
from dflash_hf.acceptance import AcceptanceReport, DecodingSettings, PlainAnswer, measure_acceptance, plain_answers
from dflash_hf.losses import compares_distributions
from dflash_hf.prefetch import place_target


HERE = Path(__file__).resolve().parent
TRAINED_DRAFTER = HERE / "drafter"


@dataclass
class DemoArguments:
    target: str | None = field(default=None, metadata={"help": "Folder with SmolLM2-135M-Instruct; fetched if unset."})
    completions: str = field(default=str(HERE / "completions.jsonl"), metadata={"help": "Chats with a split."})
    num_train_chats: int = field(default=40, metadata={"help": "Chats to train on, of those in the training split."})
    num_layers: int = field(default=2, metadata={"help": "Layers of the first act's drafter."})
    num_taps: int = field(default=5, metadata={"help": "Target layers that it reads."})
    block_size: int = field(default=8, metadata={"help": "Its slots per block, the known anchor included."})
    mask_token_id: int = field(default=15, metadata={"help": "Token id of a slot that it is to draft."})
    num_seen_prompts: int = field(default=10, metadata={"help": "Chats of the training set to decode."})
    num_unseen_prompts: int = field(default=24, metadata={"help": "Chats outside the training set to decode."})
    max_new_tokens: int = field(default=48, metadata={"help": "Tokens to decode per prompt."})
    drafter: str | None = field(
        default=str(TRAINED_DRAFTER),
        metadata={"help": "Trained drafter (folder or Hub id) that the second act continues; null leaves it out."},
    )
    continue_objective: str = field(default="dpace", metadata={"help": "Objective of the second act."})
    continue_learning_rate: float = field(default=1.2e-3, metadata={"help": "Its learning rate."})
    continue_warmup_steps: float = field(default=0.1, metadata={"help": "Its steps of warm-up, or their share."})
    continue_epochs: float = field(default=2.0, metadata={"help": "Its passes over the chats."})


class Stage:
    """What both acts share: the target, which answers and runs over the chats once, and the chats."""

    def __init__(self, demo: DemoArguments, args: DFlashTrainingArguments):
        folder = get_smollm2(demo.target)
        self.demo, self.args = demo, args
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        rows = read_completions(demo.completions)
        train_rows = spread([row for row in rows if row["split"] == "train"], demo.num_train_chats)
        test_rows = [row for row in rows if row["split"] == "test"]
        limits = {"max_length": args.max_length, "eos_token_ids": self.target.generation_config.eos_token_id}
        self.documents = tokenize_completions(train_rows, self.tokenizer, **limits)
        self.test_documents = tokenize_completions(test_rows, self.tokenizer, **limits)
        unseen = spread(test_rows, demo.num_unseen_prompts)
        self.questions = [row["messages"][0]["content"] for row in unseen]
        self.prompts = {
            "seen": prompt_ids(spread(train_rows, demo.num_seen_prompts), self.tokenizer),
            "unseen": prompt_ids(unseen, self.tokenizer),
        }
        self._plain: dict[str, list[PlainAnswer]] = {}
        self._frozen: dict[tuple[int, ...], RememberingTarget] = {}

    def play(self, drafter: DFlashDraftModel, args: DFlashTrainingArguments) -> Act:
        """Decode with a drafter, train it, save it, and decode with what was saved."""
        settings = DecodingSettings(self.demo.max_new_tokens)
        before = self.decode(drafter, settings)
        trainer = DFlashTrainer(
            model=drafter,
            target_model=self.frozen_target(drafter.config.target_layer_ids),
            args=args,
            train_dataset=self.documents,
            eval_dataset=self.test_documents,
            processing_class=self.tokenizer,
            recipe={"script": "demo.py", **asdict(self.demo)},
        )
        trainer.train()
        evaluation = trainer.evaluate()
        trainer.save_model()
        if not self._plain:
            # Not earlier, so that the machine is as warm as it is for the drafters.
            with half_of_the_threads():
                self._plain = {name: plain_answers(self.target, ids, settings) for name, ids in self.prompts.items()}
        after = self.decode(DFlashDraftModel.from_pretrained(args.output_dir).eval(), settings)
        return Act(before, after, evaluation, trainer.state.log_history)

    def decode(self, drafter: DFlashDraftModel, settings: DecodingSettings) -> dict[str, AcceptanceReport]:
        """Answers to all prompts, held against the target's own as soon as there are any."""
        with half_of_the_threads():
            return {
                name: measure_acceptance(
                    self.target, drafter, ids, settings=settings, plain=self._plain.get(name), check_lossless=False
                )
                for name, ids in self.prompts.items()
            }

    def frozen_target(self, taps: list[int]) -> RememberingTarget:
        """The target as trainers take it; drafters that read the same layers share the hidden states."""
        if tuple(taps) not in self._frozen:
            final_states = any(map(compares_distributions, (self.args.objective, self.demo.continue_objective)))
            device = place_target(self.args)[0]
            self._frozen[tuple(taps)] = RememberingTarget(self.target, taps, device, final_states=final_states)
        return self._frozen[tuple(taps)]


@contextmanager
def half_of_the_threads() -> Iterator[None]:
    """Decode one prompt on half of the CPU's threads.

    Reading the weights takes most of the time, which two threads do no faster than one; and where another program has
    work to do, threads that wait for each other in each of hundreds of small products are ten times as slow.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def prompt_ids(rows: list[dict], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each chat up to its answer, as at inference."""
    return [
        tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
        for row in rows
    ]


@torch.no_grad()
def greedy_agreement(target: PreTrainedModel, documents) -> float:
    """Share of the supervised tokens that are the target's most likely next token."""
    right = total = 0
    for document in documents:
        ids = torch.tensor([document["input_ids"]], device=target.device)
        choice = target(ids).logits.argmax(-1)
        for start, stop in document["supervised_spans"]:
            right += int((choice[0, start - 1 : stop - 1] == ids[0, start:stop]).sum())
            total += stop - start
    return right / max(total, 1)
