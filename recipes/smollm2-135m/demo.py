# SPDX-License-Identifier: Apache-2.0
"""Train a small drafter for SmolLM2-135M-Instruct on a CPU, and decode with it (`make demo`).

    python recipes/smollm2-135m/demo.py [--target FOLDER] [--drafter FOLDER] [--field value ...]

Act one: a drafter that knows nothing learns some chats. Act two: one that was trained on a GPU continues on the same
chats, as one would do in practice. Each ends in a table: the acceptance length before and after training, on chats it
trained on and on chats it never saw, both from real decoding; the speed beside that of the target alone; and five
answers beside the target's own.
"""

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from demo_report import Act, report, spread
from get_target import get_smollm2
from remembering_target import RememberingTarget
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from dflash_hf import (
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    read_completions,
    tokenize_completions,
)
from dflash_hf.acceptance import (
    AcceptanceReport,
    DecodingSettings,
    PlainAnswer,
    measure_acceptance,
    plain_answers,
    walked_acceptance_length,
)
from dflash_hf.cli import parse_config
from dflash_hf.target.pairs import place_target
from dflash_hf.training.objectives import compares_distributions


HERE = Path(__file__).resolve().parent
TRAINED_DRAFTER = HERE / "drafter"
TRAIN_COMMAND = (
    "python recipes/smollm2-135m/study.py --data FOLDER --runs muon-48 --num_layers 3 --block_size 8 "
    "--intermediate_size 768 --save_drafters true"
)


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
    continue_learning_rate: float = field(default=2e-5, metadata={"help": "Learning rate of the second act."})
    continue_warmup_steps: float = field(default=0.1, metadata={"help": "Its steps of warm-up, or their share."})
    continue_epochs: float = field(default=1.0, metadata={"help": "Its passes over the chats."})


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
            recipe={"script": Path(__file__).name, **asdict(self.demo)},
        )
        trainer.train()
        evaluation = trainer.evaluate()
        trainer.save_model()
        if not self._plain:
            # Not earlier: a machine that has been at work for minutes decodes the drafters' answers too.
            self._plain = {name: plain_answers(self.target, ids, settings) for name, ids in self.prompts.items()}
        after = self.decode(DFlashDraftModel.from_pretrained(args.output_dir).eval(), settings)
        return Act(before, after, evaluation, trainer.state.log_history)

    def decode(self, drafter: DFlashDraftModel, settings: DecodingSettings) -> dict[str, AcceptanceReport]:
        """Answers to all prompts, held against the target's own as soon as there are any."""
        return {
            name: measure_acceptance(
                self.target, drafter, ids, settings=settings, plain=self._plain.get(name), check_lossless=False
            )
            for name, ids in self.prompts.items()
        }

    def frozen_target(self, taps: list[int]) -> RememberingTarget:
        """The target as trainers take it; drafters that read the same layers share the hidden states."""
        if tuple(taps) not in self._frozen:
            final_states = compares_distributions(self.args.objective)
            device = place_target(self.args)[0]
            self._frozen[tuple(taps)] = RememberingTarget(self.target, taps, device, final_states=final_states)
        return self._frozen[tuple(taps)]


def main() -> None:
    demo, args = parse_config((DemoArguments, DFlashTrainingArguments), default_config=HERE / "config.yaml")
    start = time.time()
    stage = Stage(demo, args)
    # Early, so that a drafter that cannot be read or continued is refused before minutes of work.
    trained = load_trained(stage)
    say_agreement(stage)

    drafter = new_drafter(stage)
    print(f"\nAct one: a drafter that knows nothing learns {len(stage.documents)} chats. {describe(drafter)}")
    first = stage.play(drafter, args)
    # On the drafter's own answers, blocks drafted all at once and one after the other are the same.
    saved = DFlashDraftModel.from_pretrained(args.output_dir).eval()
    first.evaluation["walked_acceptance_length"] = walked_acceptance_length(stage.target, saved, first.after["unseen"])
    report(first, stage.questions, stage.tokenizer, Path(args.output_dir))
    print(f"Drafter, results.json and training.png are in {args.output_dir}.")

    if trained is not None:
        play_second(stage, trained, first)
    elif demo.drafter is not None:
        print(
            f"\nThere is no second act: it would continue the trained drafter in {demo.drafter}, which is not there. "
            f"With a GPU and chats that the target answered, make one by:\n  {TRAIN_COMMAND}\n"
            "and give its folder to this demo with --drafter."
        )
    print(f"{time.time() - start:.0f} s in all.")


def play_second(stage: Stage, trained: DFlashDraftModel, first: Act) -> None:
    """Continue a trained drafter on the chats of the first act."""
    demo = stage.demo
    args = replace(
        stage.args,
        output_dir=str(Path(stage.args.output_dir) / "continued"),
        learning_rate=demo.continue_learning_rate,
        warmup_steps=demo.continue_warmup_steps,
        num_train_epochs=demo.continue_epochs,
    )
    print(f"\nAct two: the trained drafter {demo.drafter} continues on the same chats. {describe(trained)}")
    second = stage.play(trained, args)
    report(second, stage.questions, stage.tokenizer, Path(args.output_dir))
    tau = [act.acceptance_length for act in (first.after["unseen"], second.before["unseen"], second.after["unseen"])]
    print(f"Drafter, results.json and training.png are in {args.output_dir}.")
    print(
        f"\nUnseen chats: {tau[0]:.2f} after learning from nothing, {tau[1]:.2f} by the trained drafter as it came, "
        f"{tau[2]:.2f} after continuing it."
    )


def new_drafter(stage: Stage) -> DFlashDraftModel:
    demo = stage.demo
    set_seed(stage.args.seed)
    config = DFlashDraftConfig.from_target_config(
        stage.target.config,
        num_hidden_layers=demo.num_layers,
        num_taps=demo.num_taps,
        block_size=demo.block_size,
        mask_token_id=demo.mask_token_id,
    )
    return DFlashDraftModel(config)


def load_trained(stage: Stage) -> DFlashDraftModel | None:
    """The second act's drafter, in fp32; None where there is to be no second act."""
    given = stage.demo.drafter
    if given is None or (given == str(TRAINED_DRAFTER) and not TRAINED_DRAFTER.exists()):
        return None
    drafter = DFlashDraftModel.from_pretrained(given, dtype=torch.float32)
    stage.frozen_target(drafter.config.target_layer_ids).check_drafter(drafter.config)
    return drafter


def describe(drafter: DFlashDraftModel) -> str:
    config = drafter.config
    return (
        f"{drafter.num_parameters() / 1e6:.1f}M parameters, {config.num_hidden_layers} layers, blocks of "
        f"{config.block_size}, taps {config.target_layer_ids}."
    )


def prompt_ids(rows: list[dict], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each chat up to its answer, as at inference."""
    return [
        tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
        for row in rows
    ]


def say_agreement(stage: Stage) -> None:
    """Say whether the recorded answers are this target's own, and what to do where they are not."""
    agreement = greedy_agreement(stage.target, stage.documents.select(range(min(8, len(stage.documents)))))
    print(f"{agreement:.1%} of the recorded answers' tokens are this target's greedy choice.")
    if agreement < 0.98:
        print(
            "The answers were written by other weights. To have this target answer: python "
            f"recipes/generate_completions.py --target {stage.target.name_or_path} --prompts "
            f"{HERE / 'prompts.jsonl'} --output FILE, then run this again with --completions FILE."
        )


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


if __name__ == "__main__":
    main()
