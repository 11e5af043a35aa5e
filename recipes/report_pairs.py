# SPDX-License-Identifier: Apache-2.0
"""Compare finished runs of the training recipe by their own logs: step, halves, wait, copies, losses.

    python recipes/report_pairs.py outputs/depth0 outputs/depth1 outputs/depth2 [--output pairs.json] [--skip 3]

Each folder holds the `trainer_state.json` of a run with `--logging_steps 1`; the first one is what losses are compared
with. `ratio` is the step over the slower half measured alone in the same run (`--measure_alone_steps`), or over the
slower half of its own steps where none was measured alone.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any


LINK_BYTES_PER_SECOND = 22e9
NAMES = ("step_seconds", "target_seconds", "drafter_seconds", "wait_seconds", "copy_seconds", "tokens_per_second")


def read_run(folder: Path, skip: int) -> dict[str, Any]:
    """Figures of one run: means over its steps but for those in turn and the first `skip` behind them."""
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in log if "loss" in entry]
    in_turn = round(sum(entry["in_turn"] for entry in steps)) % len(steps)
    measured = steps[in_turn + skip :] or steps
    figures: dict[str, Any] = {name: mean(entry[name] for entry in measured) for name in NAMES if name in measured[0]}
    last = steps[-1]
    alone = [last[name] for name in ("target_seconds_alone", "drafter_seconds_alone") if name in last]
    slower = max(alone or [figures["target_seconds"], figures["drafter_seconds"]])
    figures |= {name: value for name, value in last.items() if name.endswith(("_alone", "_gigabytes"))}
    figures |= {"steps": len(measured), "slower_half_seconds": slower, "ratio": figures["step_seconds"] / slower}
    figures["losses"] = [entry["loss"] for entry in steps]
    copies = folder / "profile_copies.json"
    if copies.exists():
        figures["copies"] = json.loads(copies.read_text())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="Output folders of runs.")
    parser.add_argument("--skip", type=int, default=3, help="Steps left out while the pipe fills.")
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    options = parser.parse_args()
    runs = {str(folder): read_run(folder, options.skip) for folder in options.folders}
    first = next(iter(runs.values()))["losses"]
    print(f"{'run':32} {'step':>8} {'target':>8} {'drafter':>8} {'wait':>8} {'copy':>8} {'ratio':>7}  losses")
    for name, run in runs.items():
        pairs = list(zip(run["losses"], first, strict=False))
        largest = max(abs(a - b) for a, b in pairs)
        run["largest_loss_difference"] = largest
        row = " ".join(
            f"{run.get(f'{part}_seconds', 0):8.4f}" for part in ("step", "target", "drafter", "wait", "copy")
        )
        print(f"{name[-32:]:32} {row} {run['ratio']:7.3f}  largest difference {largest:.3g} over {len(pairs)} steps")
        for kind, copy in run.get("copies", {}).items():
            share = copy["covered_seconds"] / copy["seconds"] if copy["seconds"] else 0.0
            at_link = copy["gigabytes"] * 1e9 / LINK_BYTES_PER_SECOND
            print(
                f"  {kind}: {copy['count']} copies, {copy['gigabytes']:.3f} GB in {copy['seconds']:.4f} s, "
                f"{share:.0%} of it under the drafter's kernels; {at_link:.4f} s at 22 GB/s"
            )
    if options.output:
        options.output.write_text(json.dumps(runs, indent=2))


if __name__ == "__main__":
    main()
