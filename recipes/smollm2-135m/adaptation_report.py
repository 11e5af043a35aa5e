# SPDX-License-Identifier: Apache-2.0
"""What the study of adapters found: the best rate of each kind of training, and a table of all."""

from typing import Any


KINDS = ("adapter", "whole")


# Of the acceptance length on the general chats that rates are chosen by, so that 98% is kept on others: of ten runs
# these lost up to 0.7% more, 0.3% at the edge.
KEPT_SHARE = 0.985


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """Gain and loss of each kind at its rate, and the adapter's share of the gain; empty without both kinds.

    A rate is chosen by the validation prompts: the best on code of those that keep 98.5% on general chats, or of all
    where none does (`keeps_general`). `share_of_gain` compares the two at these rates, `share_of_largest_gain` the
    adapter with the whole drafter that is best on code whatever it loses.
    """
    base = results["general"]["acceptance_length"]
    summary: dict[str, Any] = {}
    for kind in KINDS:
        trained = [run for run in results[kind] if "error" not in run]
        if not trained:
            return {}
        keeping = [run for run in trained if kept(run, base) >= KEPT_SHARE]
        best = best_on_code(keeping or trained)
        summary[kind] = {"learning_rate": best["learning_rate"], "keeps_general": bool(keeping)} | change(best, base)
        summary[kind]["largest"] = change(best_on_code(trained), base)
    gain, whole = summary["adapter"]["gain_on_code"], summary["whole"]
    for share, other in (("share_of_gain", whole), ("share_of_largest_gain", whole["largest"])):
        # A share of no gain would say nothing.
        summary[share] = gain / other["gain_on_code"] if other["gain_on_code"] > 0 else None
    return summary


def kept(run: dict[str, Any], base: dict[str, float]) -> float:
    return run["acceptance_length"]["general_validation"] / base["general_validation"]


def best_on_code(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return max(runs, key=lambda run: run["acceptance_length"]["code_validation"])


def change(run: dict[str, Any], base: dict[str, float]) -> dict[str, float]:
    """What a run gains on tested code prompts and changes on tested general chats."""
    lengths = run["acceptance_length"]
    return {
        "gain_on_code": lengths["code_test"] - base["code_test"],
        "change_on_general": lengths["general_test"] / base["general_test"] - 1,
    }


def report(results: dict[str, Any]) -> None:
    """Print a table of all runs and one sentence."""
    lengths = ("general, validation", "general, test", "code, validation", "code, test")
    columns = ("drafter", "rate", *lengths, "parameters", "seconds", "s/step", "peak GB", "kept GB")
    print(f"\n| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    runs = [("of general chats", results["general"])]
    runs += [(f"adapted: {kind}", run) for kind in KINDS for run in results[kind]]
    for name, run in runs:
        if "error" in run:
            print(f"| {name} | {run['learning_rate']} | {run['error']} |")
            continue
        measured = " | ".join(f"{run['acceptance_length'][name.replace(', ', '_')]:.3f}" for name in lengths)
        # Those of a drafter that was there already are unknown.
        figures = (("seconds", ".1f"), ("seconds_per_step", ".3f"), ("peak_gb", ".2f"), ("kept_gb", ".3f"))
        cost = " | ".join(format(run[figure], form) if figure in run else "" for figure, form in figures)
        print(
            f"| {name} | {run.get('learning_rate', '')} | {measured} | {run.get('trained_parameters', '')} | {cost} |"
        )
    summary = results["summary"]
    if not summary:
        print("\nOne kind of training gave no drafter, so there is nothing to compare.")
        return
    for kind in KINDS:
        if not summary[kind]["keeps_general"]:
            print(f"\nNo rate of the kind {kind} keeps {KEPT_SHARE:.1%} on general chats; the best on code is taken.")
    share, largest = (
        "no share" if summary[name] is None else f"{summary[name]:.0%}"
        for name in ("share_of_gain", "share_of_largest_gain")
    )
    print(
        f"\nThe adapter reaches {share} of the whole drafter's gain on code "
        f"({summary['adapter']['gain_on_code']:+.3f} of {summary['whole']['gain_on_code']:+.3f}); on general chats it "
        f"changes by {summary['adapter']['change_on_general']:+.1%}, the whole drafter by "
        f"{summary['whole']['change_on_general']:+.1%}. It reaches {largest} of what the whole drafter gains at its "
        f"best rate on code, where that changes by {summary['whole']['largest']['change_on_general']:+.1%} on general "
        f"chats. {results['hardware']}."
    )
