# SPDX-License-Identifier: Apache-2.0
"""Train a small drafter for SmolLM2-135M-Instruct on a CPU, and decode with it (`make demo`).

    python recipes/smollm2-135m/demo.py [--target FOLDER] [--drafter FOLDER] [--field value ...]

Act one: a drafter that knows nothing learns some chats. Act two: one that was trained on a GPU continues on the same
chats, as one would do in practice. Each ends in a table: the acceptance length before and after training, on chats it
trained on and on chats it never saw, both from real decoding; the speed beside that of the target alone; and five
answers beside the target's own.
"""

import time
from dataclasses import replace
from pathlib import Path

import torch
from demo_report import Act, report
from demo_stage import TRAINED_DRAFTER, DemoArguments, Stage, greedy_agreement
from transformers import set_seed

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainingArguments
from dflash_hf.acceptance import walked_acceptance_length
from dflash_hf.cli import parse_config


HERE = Path(__file__).resolve().parent
TRAIN_COMMAND = (
    "python recipes/smollm2-135m/study.py --data FOLDER --runs muon-48 --steps 4040 --num_layers 3 --block_size 8 "
    "--intermediate_size 768 --save_drafters true"
)


def main() -> None:
    demo, args = parse_config((DemoArguments, DFlashTrainingArguments), default_config=HERE / "config.yaml")
    start = time.time()
    stage = Stage(demo, args)
    # Early, so that what cannot be read or continued is refused before minutes of work.
    continued, trained = continued_args(demo, args), load_trained(stage)
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
        play_second(stage, trained, continued, first)
    elif demo.drafter is not None:
        print(
            f"\nThere is no second act: it would continue the trained drafter in {demo.drafter}, which is not there. "
            f"With a GPU and chats that the target answered, make one by:\n  {TRAIN_COMMAND}\n"
            "and give its folder to this demo with --drafter."
        )
    print(f"{time.time() - start:.0f} s in all.")


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


def play_second(stage: Stage, trained: DFlashDraftModel, args: DFlashTrainingArguments, first: Act) -> None:
    """Continue a trained drafter on the chats of the first act."""
    print(f"\nAct two: the trained drafter {stage.demo.drafter} continues on the same chats. {describe(trained)}")
    second = stage.play(trained, args)
    report(second, stage.questions, stage.tokenizer, Path(args.output_dir))
    print(f"Drafter, results.json and training.png are in {args.output_dir}.\n")
    for name in first.after:
        reports = (first.after[name], second.before[name], second.after[name])
        tau = [f"{report.acceptance_length:.2f}" for report in reports]
        print(
            f"{name.capitalize()} chats: {tau[0]} after learning from nothing, {tau[1]} by the trained drafter as it "
            f"came, {tau[2]} after continuing it."
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


def say_agreement(stage: Stage) -> None:
    """Say whether the recorded answers are this target's own, and what to do where they are not."""
    agreement = greedy_agreement(stage.target, stage.documents.select(range(min(8, len(stage.documents)))))
    print(f"{agreement:.1%} of the recorded answers' tokens are this target's greedy choice.")
    if agreement < 0.98:
        print(
            "The answers were written by other weights. To have this target answer: python "
            f"dflash-hf generate --target {stage.target.name_or_path} --prompts "
            f"{HERE / 'prompts.jsonl'} --output FILE, then run this again with --completions FILE."
        )


if __name__ == "__main__":
    main()
