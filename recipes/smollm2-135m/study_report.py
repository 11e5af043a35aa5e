# SPDX-License-Identifier: Apache-2.0
"""The study's table and plots, from the lines of its results file.

    python recipes/smollm2-135m/study_report.py --files outputs/study/results.jsonl [more files] [--output_dir FOLDER]

Several files are joined, so that runs spread over calls or machines stand in one table.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_hf.cli import parse_config


BASELINE = "dpace"
RESAMPLES = 2000
# Runs of each budget that have a colour in the plot over steps: the best ones, and the baseline.
NAMED_RUNS = 3


@dataclass
class ReportArguments:
    """What is joined and where it goes."""

    files: list[str] = field(metadata={"help": "Files of results."})
    output_dir: str = field(
        default=".", metadata={"help": "Folder of table.md, study.png, and curve.png with curve.json."}
    )
    baseline: str = field(default=BASELINE, metadata={"help": "Run that the others are held against."})
    curve: str | None = field(default=None, metadata={"help": "Run whose tau over budgets is plotted and fitted."})


def main(argv: list[str] | None = None) -> None:
    (arguments,) = parse_config(ReportArguments, argv, description=(__doc__ or "").split("\n")[0])
    results = [json.loads(line) for name in arguments.files for line in Path(name).read_text().splitlines()]
    write_report(results, Path(arguments.output_dir), arguments.baseline)
    print((Path(arguments.output_dir) / "table.md").read_text())
    if arguments.curve is not None:
        learning_curve(results, arguments.curve, Path(arguments.output_dir) / "curve.png")


def write_report(results: list[dict[str, Any]], output_dir: Path, baseline: str = BASELINE) -> None:
    """Write `table.md` and `study.png`."""
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "table.md").write_text(table(results, baseline))
    plot(results, output_dir / "study.png")


def final_tau(result: dict[str, Any]) -> float:
    return result["acceptance_length"][str(result["steps"])]


def grouped(results: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Results by name and steps, the seeds together, best mean tau first."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["name"], result["steps"]].append(result)
    return dict(sorted(groups.items(), key=lambda item: (item[0][1], -mean(map(final_tau, item[1])))))


def mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def interval(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """95% bootstrap interval of the mean ratio of tau, where the walked documents are known; each draw is for both."""
    if not all("documents" in result for pair in pairs for result in pair):
        return ""
    counts = np.array([[result["documents"] for result in pair] for pair in pairs], dtype=float)
    draws = np.random.default_rng(0).integers(counts.shape[2], size=(RESAMPLES, counts.shape[2]))
    committed, blocks = np.moveaxis(counts[:, :, draws].sum(axis=3), -1, 0)
    tau = committed / blocks
    low, high = np.percentile((tau[:, 0] / tau[:, 1]).mean(axis=0) - 1, [2.5, 97.5])
    return f" ({low:+.1%} to {high:+.1%})"


def table(results: list[dict[str, Any]], compared: str = BASELINE) -> str:
    """Markdown: acceptance length (mean over seeds) after each walked share of the steps, and what it costs."""
    groups = grouped(results)
    lines = [
        f"| run | steps | seeds | tau at 1/8 | 1/4 | 1/2 | all | all, by seed | to {compared} | s a step | clipped |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, steps), group in groups.items():
        points = sorted(group[0]["acceptance_length"], key=int)
        taus = [f"{mean(r['acceptance_length'][point] for r in group):.3f}" for point in points]
        baseline = groups.get((compared, steps))
        # Seed by seed, where both have it: order and anchors are then the same.
        shared = [(r, b) for r in group for b in baseline or [] if r["seed"] == b["seed"]]
        ratio = mean(final_tau(r) / final_tau(b) for r, b in shared) - 1 if shared else None
        cells = [
            name,
            str(steps),
            " ".join(str(result["seed"]) for result in group),
            *[""] * (4 - len(taus)),
            *taus[-4:],
            " ".join(f"{final_tau(result):.3f}" for result in group),
            "" if ratio is None else f"{ratio:+.1%}{interval(shared)}",
            f"{mean(result['seconds_per_step'] for result in group):.4f}",
            f"{mean(result['clipped'] for result in group):.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def learning_curve(results: list[dict[str, Any]], name: str, path: Path) -> dict[str, Any]:
    """Plot tau against training tokens, a dot for each run of a name whatever its steps, and two fits.

    Every dot is the end of a schedule of its own: points on the way of one run still have a high learning rate. The
    line over the logarithm of the tokens has no end; with three budgets or more, the curve that saturates (a ceiling
    less a power of the tokens) stands beside it, and more tokens are expected to bring something between the two.

    Returns:
        What twice the tokens add by the line, and the tau that both expect of four times the largest budget; the same
        is written beside the plot as JSON.

    Raises:
        ValueError: When there are fewer than two budgets.
    """
    runs = [result for result in results if result["name"] == name]
    num_budgets = len({result["steps"] for result in runs})
    if num_budgets < 2:
        raise ValueError(f"Run {name} has {len(runs)} results, expected some with two or more numbers of steps.")
    tokens = np.array([float(result["tokens"][str(result["steps"])]) for result in runs])
    taus = np.array([final_tau(result) for result in runs])
    more = np.geomspace(tokens.min(), tokens.max() * 4, 50)
    slope, intercept = np.polyfit(np.log2(tokens), taus, 1)
    fits = {"line": intercept + slope * np.log2(more)}
    if num_budgets > 2:
        fits["saturating"] = saturating_fit(tokens, taus, more)
    with figure(path, 1, (6, 4)) as (axes,):
        axes.plot(tokens, taus, "o")
        for label, values in fits.items():
            axes.plot(more, values, "--", label=label)
        axes.set(xscale="log", xlabel="training tokens", ylabel="acceptance length", title=name)
        axes.legend()
    expected = {label: float(values[-1]) for label, values in fits.items()}
    curve = {"name": name, "runs": len(runs), "tokens": tokens.tolist(), "acceptance_length": taus.tolist()}
    curve |= {"per_doubling": float(slope), "expected_tokens": float(more[-1]), "expected": expected}
    path.with_suffix(".json").write_text(json.dumps(curve, indent=1) + "\n")
    by_each = ", ".join(f"{tau:.2f} by the {label} fit" for label, tau in expected.items())
    print(f"{name}: tau {slope:+.3f} for twice the tokens, over {len(runs)} runs; of {more[-1]:.3g} tokens {by_each}.")
    return curve


def saturating_fit(tokens: np.ndarray, taus: np.ndarray, more: np.ndarray) -> np.ndarray:
    """`ceiling - scale * tokens ** -power` by least squares, at `more`; the power is searched, the rest is linear."""
    unit = tokens.min()

    def fit(power: float) -> tuple[float, np.ndarray]:
        terms = np.stack([np.ones_like(tokens), (tokens / unit) ** -power], axis=1)
        ceiling, scale = np.linalg.lstsq(terms, taus, rcond=None)[0]
        error = ((terms @ [ceiling, scale] - taus) ** 2).sum()
        return float(error), ceiling + scale * (more / unit) ** -power

    return min(map(fit, np.geomspace(0.01, 4.0, 400)), key=lambda result: result[0])[1]


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Acceptance length over steps, and at the end by run with every seed a dot."""
    groups = grouped(results)
    drawn: Counter[int] = Counter()
    with figure(path, 2, (13, max(4, 0.28 * len(groups) + 1.5))) as (left, right):
        for place, ((name, steps), group) in enumerate(groups.items()):
            points = sorted(group[0]["acceptance_length"], key=int)
            taus = [mean(result["acceptance_length"][point] for result in group) for point in points]
            named = name == BASELINE or drawn[steps] < NAMED_RUNS
            drawn[steps] += 1
            style = {"label": f"{name}, {steps}", "zorder": 3} if named else {"color": "0.85"}
            left.plot([int(point) for point in points], taus, marker=".", **style)
            ends = [final_tau(result) for result in group]
            right.barh(place, mean(ends), color="tab:red" if name == BASELINE else "tab:blue", alpha=0.5)
            right.plot(ends, [place] * len(ends), "k.", markersize=4)
        left.set(xlabel="step", ylabel="acceptance length", xscale="log")
        left.legend(fontsize=8)
        right.set(xlabel="acceptance length after all steps", xlim=(1, None))
        right.set_yticks(range(len(groups)), [f"{name}, {steps}" for name, steps in groups], fontsize=7)
        right.invert_yaxis()


@contextmanager
def figure(path: Path, columns: int, size: tuple[float, float]) -> Iterator[list[Any]]:
    """Axes beside each other, which are written as a picture in the end; no screen is needed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, columns, figsize=size, squeeze=False)
    yield list(axes[0])
    drawn.tight_layout()
    drawn.savefig(path, dpi=80 if columns > 1 else 120)
    pyplot.close(drawn)


if __name__ == "__main__":
    main()
