# SPDX-License-Identifier: Apache-2.0
"""Train a small drafter for SmolLM2-135M-Instruct on a CPU, and decode with it (`make demo`).

    python recipes/smollm2-135m/demo.py [--target FOLDER] [--drafter FOLDER] [--field value ...]

Act one: a drafter that knows nothing learns some chats. Act two: one that was trained on a GPU continues on the same
chats, as one would do in practice. The end is one table: the acceptance length of each by real decoding, on chats that
were trained on and on chats that were not, and the speed beside that of the target alone.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from get_target import get_smollm2
from remembering_target import RememberingTarget
from study_report import figure
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    set_seed,
)

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
    bootstrap_difference,
    measure_acceptance,
    plain_answers,
)
from dflash_hf.cli import parse_config
from dflash_hf.losses import compares_distributions
from dflash_hf.prefetch import place_target


HERE = Path(__file__).resolve().parent
TRAINED_DRAFTER = HERE / "drafter"
TRAIN_COMMAND = (
    "python recipes/smollm2-135m/study.py --data FOLDER --runs muon-48 --steps 4040 --num_layers 3 --block_size 8 "
    "--intermediate_size 768 --save_drafters true"
)
NUM_ANSWERS = 3


@dataclass
class DemoArguments:
    target: str | None = field(default=None, metadata={"help": "Folder with SmolLM2-135M-Instruct; fetched if unset."})
    completions: str = field(default=str(HERE / "completions.jsonl"), metadata={"help": "Chats with a split."})
    num_train_chats: int = field(default=40, metadata={"help": "Chats to train on, of those in the training split."})
    num_layers: int = field(default=2, metadata={"help": "Layers of the first act's drafter."})
    num_taps: int = field(default=5, metadata={"help": "Target layers that it reads."})
    block_size: int = field(default=8, metadata={"help": "Its slots per block, the known anchor included."})
    mask_token_id: int = field(default=15, metadata={"help": "Token id of a slot that it is to draft."})
    num_seen_prompts: int = field(default=6, metadata={"help": "Chats of the training set to decode."})
    num_unseen_prompts: int = field(default=10, metadata={"help": "Chats outside the training set to decode."})
    max_new_tokens: int = field(default=32, metadata={"help": "Tokens to decode per prompt."})
    drafter: str | None = field(
        default=str(TRAINED_DRAFTER),
        metadata={"help": "Trained drafter (folder or Hub id) that the second act continues; null leaves it out."},
    )
    continue_objective: str = field(default="dpace", metadata={"help": "Objective of the second act."})
    continue_learning_rate: float = field(default=1.2e-3, metadata={"help": "Its learning rate."})
    continue_warmup_steps: float = field(default=0.1, metadata={"help": "Its steps of warm-up, or their share."})
    continue_epochs: float = field(default=2.0, metadata={"help": "Its passes over the chats."})


Reports = dict[str, AcceptanceReport]  # by kind of chats, "seen" in training and "unseen"


def main(argv: Sequence[str] | None = None) -> None:
    demo, args = parse_config((DemoArguments, DFlashTrainingArguments), argv, HERE / "config.yaml")
    start = time.time()
    stage = Stage(demo, args)
    # Early, so that what cannot be read or continued is refused before minutes of work.
    continued, trained = continued_args(demo, args), load_trained(stage)
    drafter = new_drafter(stage)
    print(f"Act one: a drafter that knows nothing learns {len(stage.documents)} chats. {describe(drafter)}")
    rows = {"from nothing, after act one": stage.play(drafter, args)}
    folders = [args.output_dir]
    if trained is not None:
        print(f"Act two: the trained drafter {demo.drafter} continues on the same chats. {describe(trained)}")
        came = stage.decode(trained)
        rows |= {"trained on a GPU, as it came": came, "and after act two": stage.play(trained, continued, came)}
        folders.append(continued.output_dir)
    print("\n".join([*acceptance_table(rows), "", *answer_lines(stage, next(reversed(rows.values())))]))
    if trained is None and demo.drafter is not None:
        print(
            f"There is no second act: it would continue the trained drafter in {demo.drafter}, which is not there. "
            f"With a GPU and chats that the target answered, make one by:\n  {TRAIN_COMMAND}\n"
            "and give its folder to this demo with --drafter."
        )
    print(
        f"\n{time.time() - start:.0f} s in all. Drafters, results.json and training.png: {', '.join(folders)}.\n"
        f"Next: dflash-hf validate {folders[-1]}   (how to serve it), and README.md (a drafter for your own target)."
    )


def continued_args(demo: DemoArguments, args: DFlashTrainingArguments) -> DFlashTrainingArguments:
    """Those of the second act: gentler, since the drafter has something to lose."""
    return replace(
        args,
        output_dir=str(Path(args.output_dir) / "continued"),
        objective=demo.continue_objective,
        learning_rate=demo.continue_learning_rate,
        warmup_steps=demo.continue_warmup_steps,
        num_train_epochs=demo.continue_epochs,
    )


class Stage:
    """What both acts share: the chats, and the target, which answers and runs over each chat once."""

    def __init__(self, demo: DemoArguments, args: DFlashTrainingArguments):
        folder = get_smollm2(demo.target)
        self.demo, self.args, self.settings = demo, args, DecodingSettings(demo.max_new_tokens)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        rows = read_completions(demo.completions)
        train = spread([row for row in rows if row["split"] == "train"], demo.num_train_chats)
        test = [row for row in rows if row["split"] == "test"]
        limits = {"max_length": args.max_length, "eos_token_ids": self.target.generation_config.eos_token_id}
        self.documents = tokenize_completions(train, self.tokenizer, **limits)
        self.test_documents = tokenize_completions(test, self.tokenizer, **limits)
        chats = {"seen": spread(train, demo.num_seen_prompts), "unseen": spread(test, demo.num_unseen_prompts)}
        self.questions = [row["messages"][0]["content"] for row in chats["unseen"]]
        self.prompts = {name: [self.prompt_ids(row) for row in rows] for name, rows in chats.items()}
        self._plain: dict[str, list[PlainAnswer]] = {}
        self._frozen: dict[tuple[int, ...], RememberingTarget] = {}
        self.say_agreement()

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """Token ids of a chat up to its answer, as at inference."""
        options = {"add_generation_prompt": True, "return_dict": True}
        return self.tokenizer.apply_chat_template(row["messages"][:-1], **options)["input_ids"]

    def play(self, drafter: DFlashDraftModel, args: DFlashTrainingArguments, before: Reports | None = None) -> Reports:
        """Train a drafter, save it, and decode with what was saved."""
        trainer = DFlashTrainer(
            model=drafter,
            target_model=self.frozen_target(drafter.config.target_layer_ids),
            args=args,
            train_dataset=self.documents,
            eval_dataset=self.test_documents,
            processing_class=self.tokenizer,
            recipe={"script": "demo.py", **asdict(self.demo)},
            callbacks=[Lines()],
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.train()
        evaluation = trainer.evaluate()
        trainer.save_model()
        after = self.decode(DFlashDraftModel.from_pretrained(args.output_dir).eval())
        results: dict[str, Any] = {"evaluation": evaluation, "answers": compare_answers(self, after)}
        for name, report in after.items():
            results[name] = {"after": report.to_dict(), "after_interval": list(report.bootstrap_interval())}
            if before is not None:
                gain = bootstrap_difference(before[name], report)
                results[name] |= {"before": before[name].to_dict(), "gain_interval": list(gain)}
        (Path(args.output_dir) / "results.json").write_text(json.dumps(results, indent=1))
        plot_training(trainer.state.log_history, Path(args.output_dir) / "training.png")
        return after

    def decode(self, drafter: DFlashDraftModel) -> Reports:
        """Answers to all prompts, held against the target's own."""
        with half_of_the_threads():
            if not self._plain:
                # Not earlier, so that the machine is as warm as it is for the drafters.
                answers = {name: plain_answers(self.target, ids, self.settings) for name, ids in self.prompts.items()}
                self._plain = answers
            options: dict[str, Any] = {"settings": self.settings, "check_lossless": False}
            return {
                name: measure_acceptance(self.target, drafter, ids, plain=self._plain[name], **options)
                for name, ids in self.prompts.items()
            }

    def frozen_target(self, taps: list[int]) -> RememberingTarget:
        """The target as trainers take it; drafters that read the same layers share the hidden states."""
        if tuple(taps) not in self._frozen:
            final_states = any(map(compares_distributions, (self.args.objective, self.demo.continue_objective)))
            device = place_target(self.args)[0]
            self._frozen[tuple(taps)] = RememberingTarget(self.target, taps, device, final_states=final_states)
        return self._frozen[tuple(taps)]

    @torch.no_grad()
    def say_agreement(self) -> None:
        """Say how many of the recorded answers' tokens are this target's choice, and what to do where few are."""
        right = total = 0
        for document in self.documents.select(range(min(8, len(self.documents)))):
            ids = torch.tensor([document["input_ids"]], device=self.target.device)
            choice = self.target(ids).logits.argmax(-1)
            for start, stop in document["supervised_spans"]:
                right += int((choice[0, start - 1 : stop - 1] == ids[0, start:stop]).sum())
                total += stop - start
        agreement = right / max(total, 1)
        print(f"{agreement:.1%} of the recorded answers' tokens are this target's greedy choice.")
        if agreement < 0.98:
            print(
                "The answers were written by other weights. To have this target answer: dflash-hf generate --target "
                f"{self.target.name_or_path} --prompts {HERE / 'prompts.jsonl'} --output FILE, then run this again "
                "with --completions FILE."
            )


class Lines(TrainerCallback):
    """One line for each log of the training: loss, acceptance length, speed, and the time that is left."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in logs:
            return
        left = (time.perf_counter() - self.start) / state.global_step * (state.max_steps - state.global_step)
        print(
            f"step {state.global_step:4} of {state.max_steps}: loss {logs['loss']:6.3f}, acceptance length "
            f"{logs['acceptance_length']:.2f}, {logs.get('tokens_per_second', 0):5.0f} tokens/s, {left:3.0f} s left",
            flush=True,
        )


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
    return drafter.eval()


def describe(drafter: DFlashDraftModel) -> str:
    config = drafter.config
    return (
        f"{drafter.num_parameters() / 1e6:.1f}M parameters, {config.num_hidden_layers} layers, blocks of "
        f"{config.block_size}, taps {config.target_layer_ids}."
    )


def spread(rows: list, count: int) -> list:
    """`count` rows at equal distances: the file is ordered by the length of the prompts."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def acceptance_table(rows: dict[str, Reports]) -> list[str]:
    first = next(iter(rows.values()))
    plain = ", ".join(f"{report.plain_tokens_per_second:.1f} ({name})" for name, report in first.items())
    sizes = [f"{len(report.prompts)} {name} chats" for name, report in first.items()]
    lines = [
        "",
        "Acceptance length: tokens committed per forward of the target by real decoding, with its 95% interval; 1 is",
        f"what the target does alone. Speed: times that of the target alone, tokens/s: {plain}. A CPU takes",
        "longer over a block than over one token, a GPU hardly does.",
        "",
        f"| {'drafter':28} | {' | '.join(f'{size:>20} | speed' for size in sizes)} |",
        f"|{'-' * 30}|{('-' * 22 + '|' + '-' * 7 + '|') * len(sizes)}",
    ]
    for name, reports in rows.items():
        cells = []
        for report in reports.values():
            low, high = report.bootstrap_interval()
            tau = f"{report.acceptance_length:.2f} ({low:.2f} to {high:.2f})"
            cells.append(f"{tau:>20} | {report.speed_up:5.2f}")
        lines.append(f"| {name:28} | {' | '.join(cells)} |")
    return lines


def compare_answers(stage: Stage, reports: Reports) -> list[dict[str, Any]]:
    """Some answers to unseen chats, and whether they are the target's own greedy ones."""
    pairs = spread(list(zip(stage.questions, reports["unseen"].prompts, strict=True)), NUM_ANSWERS)
    return [
        {
            "prompt": question,
            "speculative": stage.tokenizer.decode(prompt.output_ids, skip_special_tokens=True),
            "equal": prompt.lossless,
            "committed": prompt.committed,
        }
        for question, prompt in pairs
    ]


def answer_lines(stage: Stage, reports: Reports) -> list[str]:
    lines = ["Unseen chats, as decoded with the last drafter, and whether the answer is the target's own:"]
    for answer in compare_answers(stage, reports):
        text = " ".join(answer["speculative"].split())[:70]
        lines.append(f"  {'yes' if answer['equal'] else 'NO':4}{answer['prompt']} -> {text} ...")
    return lines


def plot_training(history: list[dict[str, Any]], path: Path) -> None:
    """Loss and acceptance length on the training chats, over steps."""
    logs = [entry for entry in history if "loss" in entry]
    steps = [entry["step"] for entry in logs]
    with figure(path, 2, (9, 4)) as (left, right):
        left.plot(steps, [entry["loss"] for entry in logs])
        left.set(xlabel="step", ylabel="loss (weighted mean)")
        right.plot(steps, [entry["acceptance_length"] for entry in logs])
        right.set(xlabel="step", ylabel="acceptance length")


if __name__ == "__main__":
    main()
