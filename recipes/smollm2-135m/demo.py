# SPDX-License-Identifier: Apache-2.0
"""Train a small drafter for SmolLM2-135M-Instruct on a CPU, and decode with it (`make demo`).

    python recipes/smollm2-135m/demo.py [--target FOLDER] [--field value ...]

It ends in a table: the acceptance length before and after training, on chats it trained on and on chats it never saw,
both from real decoding, and five answers decoded speculatively beside the target's own.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from get_target import get_smollm2
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
    bootstrap_difference,
    measure_acceptance,
    walked_acceptance_length,
)
from dflash_hf.cli import parse_config
from dflash_hf.generation import speculative_generate


HERE = Path(__file__).resolve().parent


@dataclass
class DemoArguments:
    target: str | None = field(default=None, metadata={"help": "Folder with SmolLM2-135M-Instruct; fetched if unset."})
    completions: str = field(default=str(HERE / "completions.jsonl"), metadata={"help": "Chats with a split."})
    num_train_chats: int = field(default=40, metadata={"help": "Chats to train on, of those in the training split."})
    num_layers: int = field(default=2, metadata={"help": "Layers of the drafter."})
    num_taps: int = field(default=5, metadata={"help": "Target layers that the drafter reads."})
    block_size: int = field(default=8, metadata={"help": "Slots per block, the known anchor included."})
    mask_token_id: int = field(default=15, metadata={"help": "Token id of a slot to be drafted."})
    num_seen_prompts: int = field(default=10, metadata={"help": "Chats of the training set to decode."})
    num_unseen_prompts: int = field(default=24, metadata={"help": "Chats outside the training set to decode."})
    max_new_tokens: int = field(default=48, metadata={"help": "Tokens to decode per prompt."})


def main() -> None:
    demo, args = parse_config((DemoArguments, DFlashTrainingArguments), default_config=HERE / "config.yaml")
    start = time.time()
    folder = get_smollm2(demo.target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = read_completions(demo.completions)
    train_rows = spread([row for row in rows if row["split"] == "train"], demo.num_train_chats)
    test_rows = [row for row in rows if row["split"] == "test"]
    limits = {"max_length": args.max_length, "eos_token_ids": target.generation_config.eos_token_id}
    documents = tokenize_completions(train_rows, tokenizer, **limits)
    agreement = greedy_agreement(target, documents.select(range(min(8, len(documents)))))
    print(f"{agreement:.1%} of the recorded answers' tokens are this target's greedy choice.")
    if agreement < 0.98:
        print(
            "The answers were written by other weights. To have this target answer: python "
            f"recipes/generate_completions.py --target {folder} --prompts {HERE / 'prompts.jsonl'} --output FILE, "
            "then run this again with --completions FILE."
        )

    set_seed(args.seed)
    config = DFlashDraftConfig.from_target_config(
        target.config,
        num_hidden_layers=demo.num_layers,
        num_taps=demo.num_taps,
        block_size=demo.block_size,
        mask_token_id=demo.mask_token_id,
    )
    drafter = DFlashDraftModel(config)
    print(f"Drafter: {drafter.num_parameters() / 1e6:.1f}M parameters, taps {config.target_layer_ids}.")
    prompts = {
        "seen": prompt_ids(spread(train_rows, demo.num_seen_prompts), tokenizer),
        "unseen": prompt_ids(spread(test_rows, demo.num_unseen_prompts), tokenizer),
    }
    before = measure(target, drafter, prompts, demo.max_new_tokens)

    trainer = DFlashTrainer(
        model=drafter,
        target_model=target,
        args=args,
        train_dataset=documents,
        eval_dataset=tokenize_completions(test_rows, tokenizer, **limits),
        processing_class=tokenizer,
        recipe={"script": Path(__file__).name, **asdict(demo)},
    )
    trainer.train()
    evaluation = trainer.evaluate()
    trainer.save_model()
    plot_training(trainer.state.log_history, Path(args.output_dir) / "training.png")

    drafter = DFlashDraftModel.from_pretrained(args.output_dir).eval()
    after = measure(target, drafter, prompts, demo.max_new_tokens)
    # On the drafter's own answers, blocks drafted all at once and one after the other are the same.
    evaluation["walked_acceptance_length"] = walked_acceptance_length(target, drafter, after["unseen"])
    answers = compare_answers(target, drafter, tokenizer, spread(test_rows, 5), demo.max_new_tokens)
    report(before, after, answers, evaluation, Path(args.output_dir))
    print(f"Drafter, results.json and training.png are in {args.output_dir}. {time.time() - start:.0f} s in all.")


def spread(rows: list[dict], count: int) -> list[dict]:
    """`count` rows at equal distances: the file is ordered by the length of the prompts."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


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
        ids = torch.tensor([document["input_ids"]])
        choice = target(ids).logits.argmax(-1)
        for start, stop in document["supervised_spans"]:
            right += int((choice[0, start - 1 : stop - 1] == ids[0, start:stop]).sum())
            total += stop - start
    return right / max(total, 1)


def measure(
    target: PreTrainedModel, drafter: DFlashDraftModel, prompts: dict[str, list[list[int]]], max_new_tokens: int
) -> dict[str, AcceptanceReport]:
    return {
        name: measure_acceptance(target, drafter, ids, max_new_tokens, check_lossless=False)
        for name, ids in prompts.items()
    }


def compare_answers(target, drafter, tokenizer, rows: list[dict], max_new_tokens: int) -> list[dict]:
    """Speculative and plain greedy answers to the same prompts."""
    answers = []
    for row, ids in zip(rows, prompt_ids(rows, tokenizer), strict=True):
        ids = torch.tensor([ids], device=target.device)
        speculative = speculative_generate(target, drafter, ids, max_new_tokens)
        greedy = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
        )
        answers.append(
            {
                "prompt": row["messages"][0]["content"],
                "speculative": tokenizer.decode(speculative.sequences[0, ids.shape[1] :], skip_special_tokens=True),
                "equal": torch.equal(speculative.sequences, greedy),
                "committed": speculative.committed,
            }
        )
    return answers


def report(before, after, answers: list[dict], evaluation: dict, folder: Path) -> None:
    """Print the table and write it as JSON."""
    lines = [
        "",
        f"Acceptance length: tokens committed per forward of the target, of at most {before['seen'].block_size}",
        "(1 is what the target does alone; the first token of an answer is not counted; real decoding)",
        "",
        "| chats          | before | after | after, 95% interval | after - before, 95% interval |",
        "|----------------|--------|-------|---------------------|------------------------------|",
    ]
    results = {"evaluation": evaluation, "answers": answers}
    for name in before:
        low, high = after[name].bootstrap_interval()
        gain = bootstrap_difference(before[name], after[name])
        label = f"{len(after[name].prompts)} {name}"
        lines.append(
            f"| {label:14} | {before[name].acceptance_length:6.2f} | {after[name].acceptance_length:5.2f} "
            f"| {low:8.2f} to {high:.2f}    | {gain[0]:13.2f} to {gain[1]:.2f}        |"
        )
        results[name] = {
            "before": before[name].to_dict(),
            "after": after[name].to_dict(),
            "after_interval": [low, high],
            "gain_interval": list(gain),
        }
    lines += ["", "| answer equals the target's own | tokens per forward | prompt | answer |", "|---|---|---|---|"]
    for answer in answers:
        rate = sum(answer["committed"]) / max(len(answer["committed"]), 1)
        text = " ".join(answer["speculative"].split())
        text = text if len(text) <= 60 else text[:57] + "..."
        lines.append(f"| {'yes' if answer['equal'] else 'NO'} | {rate:.2f} | {answer['prompt']} | {text} |")
    print("\n".join(lines))
    (folder / "results.json").write_text(json.dumps(results, indent=1))


def plot_training(history: list[dict], path: Path) -> None:
    """Loss and acceptance length on the training chats, over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    logs = [entry for entry in history if "loss" in entry]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4))
    steps = [entry["step"] for entry in logs]
    left.plot(steps, [entry["loss"] for entry in logs])
    left.set(xlabel="step", ylabel="loss (weighted mean)")
    right.plot(steps, [entry["acceptance_length"] for entry in logs])
    right.set(xlabel="step", ylabel="acceptance length")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
