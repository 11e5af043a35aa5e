# SPDX-License-Identifier: Apache-2.0
"""Compare finished runs of the training recipe by their own logs: step, halves, wait, copies, losses.

    python recipes/report_pairs.py outputs/depth0 outputs/depth1 outputs/depth2 [--output pairs.json] [--skip 3]

Each folder holds the `trainer_state.json` of a run with one micro-batch a step; the first one is what losses are
compared with. A log is the mean of its steps, so logs that hold a step in turn, a profiled one or one of the first few
behind either are left out whole: the rarer the logs, the more steps a run needs. `ratio` is the step over the slower
half measured alone in the same run (`--measure_alone_steps`), or over the slower half of its own steps where none was
measured alone.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


LINK_BYTES_PER_SECOND = 22e9
NAMES = ("step_seconds", "target_seconds", "drafter_seconds", "wait_seconds", "copy_seconds", "tokens_per_second")


@dataclass(frozen=True)
class Log:
    """Means over the steps from `first` to `last`, counted from 1."""

    first: int
    last: int
    values: dict[str, Any]

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def holds(self, first: int, last: int) -> bool:
        """Whether one of its steps is one of these."""
        return self.first <= last and first <= self.last


def read_logs(history: list[dict[str, Any]]) -> list[Log]:
    """The logs of training steps."""
    entries = [entry for entry in history if "step_seconds" in entry]
    before = [0, *(entry["step"] for entry in entries)]
    return [Log(start + 1, entry["step"], entry) for start, entry in zip(before, entries, strict=False)]


def measured_logs(logs: list[Log], skip: int, profiled: list[int] | None, folder: Path) -> list[Log]:
    """The logs without steps in turn, profiled steps, and the first `skip` behind these."""
    in_turn = round(sum(log.values["in_turn"] * log.count for log in logs))
    # A run whose halves always take turns is measured as it is.
    spans = [(1, (0 if in_turn == logs[-1].last else in_turn) + skip)]
    if profiled:
        # Writing the profile falls into the step behind it.
        spans.append((profiled[0], profiled[1] + 1 + skip))
    measured = [log for log in logs if not any(log.holds(*span) for span in spans)]
    if not measured:
        left_out = ", ".join(f"{first} to {last}" for first, last in spans)
        raise SystemExit(
            f"{folder}: every log holds a step that is left out ({left_out}). Run more steps, log more often, or give "
            f"a smaller --skip than {skip}."
        )
    return measured


def mean(name: str, logs: list[Log]) -> float:
    return sum(log.values[name] * log.count for log in logs) / sum(log.count for log in logs)


def read_run(folder: Path, skip: int) -> dict[str, Any]:
    """Figures of one run."""
    state = folder / "trainer_state.json"
    if not state.is_file():
        raise SystemExit(f"{folder} has no trainer_state.json: give the output_dir of a run that has ended.")
    logs = read_logs(json.loads(state.read_text())["log_history"])
    if not logs:
        raise SystemExit(f"{state} holds no log of a training step: train with a --logging_steps below the steps.")
    path = folder / "profile_copies.json"
    profile = json.loads(path.read_text()) if path.exists() else {}
    measured = measured_logs(logs, skip, profile.get("steps"), folder)
    figures: dict[str, Any] = {name: mean(name, measured) for name in NAMES if name in measured[0].values}
    last = logs[-1].values
    alone = [last[name] for name in ("target_seconds_alone", "drafter_seconds_alone") if name in last]
    slower = max(alone or [figures["target_seconds"], figures["drafter_seconds"]])
    figures |= {name: value for name, value in last.items() if name.endswith(("_alone", "_gigabytes"))}
    figures["steps"] = sum(log.count for log in measured)
    figures |= {"slower_half_seconds": slower, "ratio": figures["step_seconds"] / slower}
    figures["losses"] = {f"{log.first}-{log.last}": log.values["loss"] for log in logs}
    return figures | {"copies": profile.get("copies", {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="Output folders of runs.")
    parser.add_argument(
        "--skip",
        type=int,
        default=3,
        help="Steps left out while the pipe fills, at the start and behind steps in turn or profiled.",
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    options = parser.parse_args()
    runs = {str(folder): read_run(folder, options.skip) for folder in options.folders}
    first = next(iter(runs.values()))["losses"]
    print(f"{'run':32} {'step':>8} {'target':>8} {'drafter':>8} {'wait':>8} {'copy':>8} {'ratio':>7}  steps  losses")
    for name, run in runs.items():
        # Means over the same steps.
        both = [(loss, first[steps]) for steps, loss in run["losses"].items() if steps in first]
        run["largest_loss_difference"] = largest = max((abs(a - b) for a, b in both), default=None)
        said = (
            "no log of the same steps" if largest is None else f"largest difference {largest:.3g} in {len(both)} logs"
        )
        row = " ".join(
            f"{run.get(f'{part}_seconds', 0):8.4f}" for part in ("step", "target", "drafter", "wait", "copy")
        )
        print(f"{name[-32:]:32} {row} {run['ratio']:7.3f}  {run['steps']:5}  {said}")
        for kind, copy in run["copies"].items():
            share = copy["covered_seconds"] / copy["seconds"] if copy["seconds"] else 0.0
            at_link = copy["gigabytes"] * 1e9 / LINK_BYTES_PER_SECOND
            print(
                f"  {kind}: {copy['count']} copies, {copy['gigabytes']:.3f} GB in {copy['seconds']:.4f} s, "
                f"{share:.0%} of it under the drafter's kernels; {at_link:.4f} s at 22 GB/s"
            )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
