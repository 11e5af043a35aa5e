# SPDX-License-Identifier: Apache-2.0
"""What the study of adapters found: the best rate of each kind of training, and a table of all."""

from typing import Any


KINDS = ("adapter", "whole")


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """The rate of each kind that is best on the validation prompts, its gain and its loss; empty without both."""
    base = results["general"]["acceptance_length"]
    summary: dict[str, Any] = {}
    for kind in KINDS:
        trained = [run for run in results[kind] if "error" not in run]
        if not trained:
            return {}
        best = max(trained, key=lambda run: run["acceptance_length"]["code_validation"])
        lengths = best["acceptance_length"]
        summary[kind] = {
            "learning_rate": best["learning_rate"],
            "gain_on_code": lengths["code_test"] - base["code_test"],
            "change_on_general": lengths["general"] / base["general"] - 1,
        }
    whole = summary["whole"]["gain_on_code"]
    # A share of no gain would say nothing.
    summary["share_of_gain"] = summary["adapter"]["gain_on_code"] / whole if whole > 0 else None
    return summary


def report(results: dict[str, Any]) -> None:
    """Print a table of all runs and one sentence."""
    columns = ("drafter", "rate", "general", "code, validation", "code, test", "parameters", "seconds", "s/step")
    print(f"\n| {' | '.join(columns)} | peak GB | kept GB |")
    print("|---" * (len(columns) + 2) + "|")
    runs = [("of general chats", results["general"])]
    runs += [(f"adapted: {kind}", run) for kind in KINDS for run in results[kind]]
    for name, run in runs:
        if "error" in run:
            print(f"| {name} | {run['learning_rate']} | {run['error']} |")
            continue
        lengths = " | ".join(f"{run['acceptance_length'][k]:.3f}" for k in ("general", "code_validation", "code_test"))
        # Those of a drafter that was there already are unknown.
        figures = (("seconds", ".1f"), ("seconds_per_step", ".3f"), ("peak_gb", ".2f"), ("kept_gb", ".3f"))
        cost = " | ".join(format(run[figure], form) if figure in run else "" for figure, form in figures)
        print(
            f"| {name} | {run.get('learning_rate', '')} | {lengths} | {run.get('trained_parameters', '')} | {cost} |"
        )
    summary = results["summary"]
    if not summary:
        print("\nOne kind of training gave no drafter, so there is nothing to compare.")
        return
    share = summary["share_of_gain"]
    print(
        f"\nThe adapter reaches {'no share' if share is None else f'{share:.0%}'} of the whole drafter's gain on code "
        f"({summary['adapter']['gain_on_code']:+.3f} of {summary['whole']['gain_on_code']:+.3f}); on general chats it "
        f"changes by {summary['adapter']['change_on_general']:+.1%}, the whole drafter by "
        f"{summary['whole']['change_on_general']:+.1%}. {results['hardware']}."
    )
