# SPDX-License-Identifier: Apache-2.0
"""What the demo shows and keeps of an act: table, answers, speeds, `results.json` and `training.png`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash_hf.acceptance import AcceptanceReport, bootstrap_difference


NUM_ANSWERS = 5


@dataclass(frozen=True)
class Act:
    """A drafter before and after its training.

    Args:
        before: Report of real decoding by the name of the chats, `"seen"` in training and `"unseen"`.
        after: The same after the training, beside the target's own answers.
        evaluation: Figures of the trainer's evaluation on unseen chats.
        history: What the trainer logged.
    """

    before: dict[str, AcceptanceReport]
    after: dict[str, AcceptanceReport]
    evaluation: dict[str, float]
    history: list[dict[str, Any]]


def spread(rows: list, count: int) -> list:
    """`count` rows at equal distances: the file is ordered by the length of the prompts."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def report(act: Act, questions: list[str], tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Print what an act brought, and write it into its folder.

    Args:
        act: The act.
        questions: The user's words of each unseen chat, in the report's order.
        tokenizer: The target's.
        folder: Where `results.json` and `training.png` go.
    """
    answers = compare_answers(act.after["unseen"], questions, tokenizer)
    print("\n".join([*acceptance_table(act), "", *speeds(act), "", *answer_table(answers)]))
    results: dict[str, Any] = {"evaluation": act.evaluation, "answers": answers}
    for name, after in act.after.items():
        results[name] = {
            "before": act.before[name].to_dict(),
            "after": after.to_dict(),
            "after_interval": list(after.bootstrap_interval()),
            "gain_interval": list(bootstrap_difference(act.before[name], after)),
        }
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    plot_training(act.history, folder / "training.png")


def acceptance_table(act: Act) -> list[str]:
    lines = [
        "",
        f"Acceptance length: tokens committed per forward of the target, of at most {act.after['seen'].block_size}",
        "(1 is what the target does alone; the first token of an answer is not counted; real decoding)",
        "",
        "| chats          | before | after | after, 95% interval | after - before, 95% interval |",
        "|----------------|--------|-------|---------------------|------------------------------|",
    ]
    for name, after in act.after.items():
        low, high = after.bootstrap_interval()
        gain = bootstrap_difference(act.before[name], after)
        label = f"{len(after.prompts)} {name}"
        lines.append(
            f"| {label:14} | {act.before[name].acceptance_length:6.2f} | {after.acceptance_length:5.2f} "
            f"| {low:8.2f} to {high:.2f}    | {gain[0]:13.2f} to {gain[1]:.2f}        |"
        )
    return lines


def speeds(act: Act) -> list[str]:
    """Tokens per second of the target alone and with the drafter, over the same prompts."""
    lines = [
        f"{name} chats: {after.plain_tokens_per_second:.1f} tokens/s by the target alone, "
        f"{after.tokens_per_second:.1f} with this drafter ({after.speed_up:.2f} times)."
        for name, after in act.after.items()
    ]
    return [*lines, "(A CPU takes longer over a block than over one token; a GPU hardly does, and gains the more.)"]


def compare_answers(
    unseen: AcceptanceReport, questions: list[str], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Some of the answers, and whether they are the target's own greedy ones."""
    return [
        {
            "prompt": question,
            "speculative": tokenizer.decode(prompt.output_ids, skip_special_tokens=True),
            "equal": prompt.lossless,
            "committed": prompt.committed,
        }
        for question, prompt in spread(list(zip(questions, unseen.prompts, strict=True)), NUM_ANSWERS)
    ]


def answer_table(answers: list[dict[str, Any]]) -> list[str]:
    lines = ["| answer equals the target's own | tokens per forward | prompt | answer |", "|---|---|---|---|"]
    for answer in answers:
        rate = sum(answer["committed"]) / max(len(answer["committed"]), 1)
        text = " ".join(answer["speculative"].split())
        text = text if len(text) <= 60 else text[:57] + "..."
        lines.append(f"| {'yes' if answer['equal'] else 'NO'} | {rate:.2f} | {answer['prompt']} | {text} |")
    return lines


def plot_training(history: list[dict[str, Any]], path: Path) -> None:
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
