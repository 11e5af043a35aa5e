# SPDX-License-Identifier: Apache-2.0
"""Acceptance reports as Markdown tables and plots."""

import math
from collections.abc import Mapping
from pathlib import Path

from .report import AcceptanceReport, PromptAcceptance
from .serving import ServerReport


DEFINITION = (
    "Acceptance length: tokens committed per verification forward of the target (accepted drafts and the target's own "
    "next token), pooled over all prompts; the prefill and its token are not counted."
)


def markdown(reports: Mapping[str, AcceptanceReport], walked: Mapping[str, float]) -> str:
    """Tables of several drafters over the same prompts.

    Args:
        reports: Report of each drafter by its name.
        walked: Acceptance lengths by the teacher-forced walk, where they were taken.
    """
    rows = []
    for name, report in reports.items():
        rows.append(
            [
                name,
                _number(report.acceptance_length),
                _interval(report.bootstrap_interval()),
                _number(report.acceptance_length_without_last_block),
                _number(walked.get(name, math.nan)),
                _number(report.tokens_per_second, 1),
                _number(report.plain_tokens_per_second, 1),
                _number(report.speed_up),
                _interval(report.speed_up_interval()),
                _losslessness(report),
            ]
        )
    heads = ["drafter", "acceptance length", "95% interval", "without last blocks", "by the walk", "tokens/s"]
    heads += ["plain tokens/s", "speed-up", "its 95% interval", "equal to plain answers"]
    parts = [DEFINITION, _table(heads, rows), _slots({name: r.slot_acceptance for name, r in reports.items()})]
    for title, key in (("source", _source), ("language", _language)):
        groups = {name: report.groups(key) for name, report in reports.items()}
        values = dict.fromkeys(value for group in groups.values() for value in group)
        # Of a run that was interrupted, later drafters may lack some.
        cells = [
            [value, str(max(len(group[value].prompts) for group in groups.values() if value in group))]
            + [_number(group[value].acceptance_length if value in group else math.nan) for group in groups.values()]
            for value in values
        ]
        if cells:
            parts.append(_table([title, "prompts", *groups], cells))
    return "\n\n".join(parts) + "\n"


def server_markdown(reports: Mapping[str, ServerReport], plain_tokens_per_second: float | None = None) -> str:
    """Tables of several servers over the same prompts.

    Args:
        reports: Report of each server by its name.
        plain_tokens_per_second: Of a server without speculation, where one was measured.
    """
    rows: list[list[str]] = []
    group_rows: dict[tuple[str | None, str | None], dict[str, str]] = {}
    names = list(reports)
    for name, report in reports.items():
        speed_up = report.tokens_per_second / plain_tokens_per_second if plain_tokens_per_second else math.nan
        cells = [name, report.engine, _number(report.verifications.acceptance_length)]
        cells += [_number(report.tokens_per_second, 1), _number(plain_tokens_per_second or math.nan, 1)]
        rows.append([*cells, _number(speed_up), "its answers" if report.per_request else "the server's counters"])
        for key, part in report.groups.items():
            group_rows.setdefault(key, {})[name] = _number(part.acceptance_length)
    heads = ["server", "engine", "acceptance length", "tokens/s", "plain tokens/s", "speed-up", "counted from"]
    slots = {name: report.summary()["slot_acceptance"] for name, report in reports.items()}
    groups = [
        [source or "-", language or "-", *(cells.get(name, "-") for name in names)]
        for (source, language), cells in group_rows.items()
    ]
    tables = [_table(heads, rows), _slots(slots), _table(["source", "language", *names], groups)]
    return "\n\n".join([DEFINITION, *tables]) + "\n"


def plot_label(name: str) -> str:
    """A name as matplotlib shows it: between dollars it would be a formula, and with an underscore first be hidden."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def plot_slots(slots: Mapping[str, list[float]], axes) -> None:
    """Share of all blocks that accept the draft of each slot."""
    for name, shares in slots.items():
        axes.plot(range(1, len(shares) + 1), shares, marker=".", label=plot_label(name))
    axes.set(xlabel="slot", ylabel="share of blocks that accept it", ylim=(0, 1), title="acceptance per slot")
    axes.legend()


def plot_reports(reports: Mapping[str, AcceptanceReport], path: Path) -> None:
    """Acceptance per slot, committed tokens per block, and the acceptance length over the answer."""
    figure, (slots, histogram, positions) = _figure(3)
    plot_slots({name: report.slot_acceptance for name, report in reports.items()}, slots)
    width = 0.8 / len(reports)
    for index, report in enumerate(reports.values()):
        counts = report.committed_histogram
        shares = [count / max(sum(counts), 1) for count in counts]
        histogram.bar([k + 1 + (index + 0.5) * width - 0.4 for k in range(len(shares))], shares, width)
        stretches = report.by_position(max(1, report.max_new_tokens // 16))
        positions.plot([s["position"] for s in stretches], [s["acceptance_length"] for s in stretches], marker=".")
    histogram.set(xlabel="tokens committed", ylabel="share of blocks", title="committed tokens per block")
    positions.set(xlabel="token of the answer", ylabel="acceptance length", title="acceptance over the answer")
    positions.set_ylim(bottom=1)
    figure.savefig(path, dpi=120)


def plot_servers(reports: Mapping[str, ServerReport], path: Path) -> None:
    """Acceptance per slot, for the servers that tell it."""
    slots = {name: shares for name, r in reports.items() if (shares := r.summary()["slot_acceptance"])}
    if slots:
        figure, (axes,) = _figure(1)
        plot_slots(slots, axes)
        figure.savefig(path, dpi=120)


def _figure(columns: int):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _source(prompt: PromptAcceptance) -> str | None:
    return prompt.source


def _language(prompt: PromptAcceptance) -> str | None:
    return prompt.language


def _losslessness(report: AcceptanceReport) -> str:
    if report.lossless is None:
        return "not compared"
    equal = sum(bool(prompt.lossless) for prompt in report.prompts)
    other = len(report.prompts) - equal - report.num_ties
    return f"{equal} of {len(report.prompts)}, {report.num_ties} ties, {other} differ"


def _slots(slots: Mapping[str, list[float]]) -> str:
    most = max((len(shares) for shares in slots.values()), default=0)
    cells = [
        [name, *(_number(share) for share in shares + [math.nan] * (most - len(shares)))]
        for name, shares in slots.items()
    ]
    return _table(["acceptance of slot", *(str(k) for k in range(1, most + 1))], cells)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    # Names of files and sources may hold what separates cells and rows.
    cleaned = [[" ".join(cell.split()).replace("|", "\\|") for cell in cells] for cells in [heads, *rows]]
    lines = [cleaned[0], ["---"] * len(heads), *cleaned[1:]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _interval(bounds: tuple[float, float]) -> str:
    low, high = map(_number, bounds)
    return "-" if low == "-" else f"{low} to {high}"


def _number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


__all__ = ["DEFINITION", "markdown", "plot_label", "plot_reports", "plot_servers", "server_markdown"]
