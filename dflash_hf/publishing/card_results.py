# SPDX-License-Identifier: Apache-2.0
"""Acceptance as a model card tells it, from what `recipes/evaluate_acceptance.py` or the demo wrote."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..decoding.report_files import plot_label


@dataclass(frozen=True)
class ResultRow:
    """One line of a card's table.

    Args:
        prompts: What the prompts are.
        number: How many.
        acceptance_length: Tokens per verification forward.
        low: Lower end of its 95% interval, where one is known.
        high: Upper end.
        speed_up: Over plain decoding, where it was timed.
        slots: Share of blocks that accept the draft of each slot.
    """

    prompts: str
    number: int
    acceptance_length: float
    low: float | None = None
    high: float | None = None
    speed_up: float | None = None
    slots: tuple[float, ...] = ()


@dataclass(frozen=True)
class CardResults:
    """A card's table and the sentence that says how it was measured."""

    rows: tuple[ResultRow, ...]
    settings: str


def load_results(path: Path, drafter: str | None = None) -> dict[str, Any]:
    """A file of results that a card can tell.

    Args:
        path: `results.json` of `recipes/evaluate_acceptance.py` or `recipes/smollm2-135m/demo.py`.
        drafter: As for [`read_results`].

    Raises:
        ValueError: It is something else, and why.
        OSError: It cannot be read.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        read_results(results, drafter)
    except ValueError as error:
        raise ValueError(f"{path} is not what the card reads ({error})") from error
    return results


def read_results(results: dict[str, Any], drafter: str | None = None) -> CardResults:
    """The rows of a card.

    Args:
        results: What `recipes/evaluate_acceptance.py` or `recipes/smollm2-135m/demo.py` wrote as `results.json`.
        drafter: Which drafter of it, where there are several: its name there.

    Raises:
        ValueError: It is something else, was interrupted, measured nothing, or holds several drafters and none was
            named.
    """
    try:
        return _read_results(results, drafter)
    # Any JSON may be in a file of that name.
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"The results have another form than those of our recipes ({error!r}).") from error


def _read_results(results: dict[str, Any], drafter: str | None) -> CardResults:
    if "drafters" in results:
        return _read_evaluation(results, drafter)
    groups = {name: value["after"] for name, value in results.items() if isinstance(value, dict) and "after" in value}
    if not groups:
        raise ValueError(
            f"The results hold {sorted(results)}; expected results.json of recipes/evaluate_acceptance.py (with "
            "`drafters`, measured by decoding here and not on a server) or of recipes/smollm2-135m/demo.py."
        )
    names = {"seen": "chats it was trained on", "unseen": "chats it never saw"}
    rows = [
        _row(names.get(name, name), report, results[name].get("after_interval")) for name, report in groups.items()
    ]
    tokens = {report["max_new_tokens"] for report in groups.values()}
    settings = f"Greedy decoding, {_span(tokens)} new tokens per prompt at most."
    return CardResults(tuple(rows), settings)


def _read_evaluation(results: dict[str, Any], drafter: str | None) -> CardResults:
    reports = results["drafters"]
    if not results.get("finished", True):
        raise ValueError(
            "The evaluation was interrupted, so its results are of a part of the prompts. Run "
            "recipes/evaluate_acceptance.py to its end before publishing them."
        )
    if drafter is None and len(reports) == 1:
        drafter = next(iter(reports))
    if drafter not in reports:
        raise ValueError(f"The results are of the drafters {sorted(reports)}, not of {drafter}. Name one of them.")
    report, settings = reports[drafter], results["settings"]
    sources = report.get("by_source") or {}
    # Of some prompts every answer may have ended with its first token.
    measured = {source: part for source, part in sources.items() if part["acceptance_length"] is not None}
    rows = [_row(source, part, None) for source, part in measured.items()] if len(sources) > 1 else []
    rows.append(_row(next(iter(sources)) if len(sources) == 1 else "all", report, report.get("interval")))
    temperature = settings["temperature"]
    parts = [
        "Greedy decoding" if not temperature else f"Sampling at temperature {temperature}, top-p {settings['top_p']}",
        f"{settings['max_new_tokens']} new tokens per prompt at most",
        f"target in {str(settings.get('target_dtype', settings['dtype'])).removeprefix('torch.')}",
    ]
    if settings.get("enable_thinking") is not None:
        parts.append(f"thinking {'on' if settings['enable_thinking'] else 'off'}")
    if settings.get("hardware"):
        parts.append(f"on {settings['hardware']}")
    parts.append(f"transformers {settings['versions']['transformers']}, torch {settings['versions']['torch']}")
    return CardResults(tuple(rows), f"{', '.join(parts)}.")


def _row(prompts: str, report: dict[str, Any], interval: Any) -> ResultRow:
    length = report["acceptance_length"]
    if length is None or not math.isfinite(length):
        raise ValueError(f"The results have no acceptance length for {prompts}: no answer was longer than one token.")
    low, high = interval or (None, None)
    number = report["num_prompts"] if "num_prompts" in report else len(report["prompts"])
    slots = tuple(share for share in report.get("slot_acceptance", []) if share is not None)
    return ResultRow(prompts, number, length, low, high, report.get("speed_up"), slots)


def _span(values: set[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def plot_results(results: CardResults, path: Path) -> None:
    """The acceptance lengths with their intervals, and the share of blocks that accept the draft of each slot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in results.rows if row.slots]
    figure = Figure(figsize=(10 if shown else 6, 1.5 + max(2.5, 0.4 * len(results.rows))), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, *others = figure.subplots(1, 2 if shown else 1, squeeze=False)[0]
    for slots in others:
        for row in shown:
            slots.plot(range(1, len(row.slots) + 1), row.slots, marker=".", label=plot_label(row.prompts))
        slots.set(xlabel="drafted slot", ylabel="share of blocks that accept it", ylim=(0, 1))
        slots.set(title="acceptance per slot", xticks=range(1, max(len(row.slots) for row in shown) + 1))
        slots.legend()
    names = [plot_label(row.prompts) for row in results.rows]
    values = [row.acceptance_length for row in results.rows]
    below = [0 if row.low is None else max(0.0, row.acceptance_length - row.low) for row in results.rows]
    above = [0 if row.high is None else max(0.0, row.high - row.acceptance_length) for row in results.rows]
    lengths.barh(names, values, xerr=[below, above], capsize=4)
    lengths.invert_yaxis()
    lengths.axvline(1, color="gray", linewidth=1)
    lengths.set(xlabel="tokens per forward of the target", xlim=(0, None), title="acceptance length")
    figure.savefig(path, dpi=120)


__all__ = ["CardResults", "ResultRow", "load_results", "plot_results", "read_results"]
