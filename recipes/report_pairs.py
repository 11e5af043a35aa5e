# SPDX-License-Identifier: Apache-2.0
"""Compare finished runs of the training recipe by their own logs: step, halves, wait, copies, losses.

    python recipes/report_pairs.py outputs/depth0 outputs/depth1 outputs/depth2 [--output pairs.json] [--skip 3]
    python recipes/report_pairs.py outputs/two-pairs outputs/one-pair --weights

Each folder holds the `trainer_state.json` of a run with one micro-batch a step; the first one is what losses are
compared with. A log is the mean of its steps, so logs that hold a step in turn, a profiled one or one of the first few
behind either are left out whole: the rarer the logs, the more steps a run needs. `ratio` is the step over the slower
half measured alone in the same run (`--measure_alone_steps`), or over the slower half of its own steps. With
`--weights` the weights of the newest `checkpoint-N` that all runs have are compared with the first run's: the norm of
the difference over that of the weights, and the largest difference of a single one.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


LINK_BYTES_PER_SECOND = 22e9
PARTS = ("step", "target", "drafter", "wait", "copy")


def read_run(folder: Path, skip: int) -> dict[str, Any]:
    """Figures of one run, over the steps of all logs that hold none in turn or profiled, nor `skip` ones behind.

    Raises:
        SystemExit: Naming the folder of a run that has not ended, or has nothing to measure.
    """
    state, copies = folder / "trainer_state.json", folder / "profile_copies.json"
    if not state.is_file():
        raise SystemExit(f"{folder} has no trainer_state.json: give the output_dir of a run that has ended.")
    profile = json.loads(copies.read_text()) if copies.exists() else {}
    history = json.loads(state.read_text())["log_history"]
    logs = [log for log in ({**entry, **entry.get("details", {})} for entry in history) if "step_seconds" in log]
    for before, log in zip([{"step": 0}, *logs], logs, strict=False):
        log["first"], log["count"] = before["step"] + 1, log["step"] - before["step"]
    in_turn = round(sum(log["in_turn"] * log["count"] for log in logs))
    # A run whose halves always take turns is measured as it is.
    spans = [(1, (0 if logs and in_turn == logs[-1]["step"] else in_turn) + skip)]
    if profile.get("steps"):
        # Writing the profile falls into the step behind it.
        spans.append((profile["steps"][0], profile["steps"][1] + 1 + skip))
    measured = [log for log in logs if not any(log["first"] <= b and a <= log["step"] for a, b in spans)]
    if not measured:
        raise SystemExit(f"{folder}: no log is without the steps {spans}. Run more steps, or give a smaller --skip.")
    figures: dict[str, Any] = {"steps": sum(log["count"] for log in measured)}
    for name in (*(f"{part}_seconds" for part in PARTS), "tokens_per_second"):
        if name in measured[0]:
            figures[name] = sum(log[name] * log["count"] for log in measured) / figures["steps"]
    last = logs[-1]
    figures |= {name: value for name, value in last.items() if name.endswith(("_alone", "_gigabytes"))}
    halves = [last[name] for name in ("target_seconds_alone", "drafter_seconds_alone") if name in last]
    figures["slower_half_seconds"] = max(halves or [figures["target_seconds"], figures["drafter_seconds"]])
    figures["ratio"] = figures["step_seconds"] / figures["slower_half_seconds"]
    figures["losses"] = {f"{log['first']}-{log['step']}": log["loss"] for log in logs}
    return figures | {"copies": profile.get("copies", {})}


def add_weights(runs: dict[str, dict[str, Any]]) -> None:
    """Compare the weights of the newest checkpoint that all runs have with the first run's."""
    # Without weights the report needs no torch, and is there at once.
    from dflash_hf.checkpointing import checkpoints_in

    first, *others = runs
    checkpoints = {name: checkpoints_in(name) for name in runs}
    common = set.intersection(*map(set, checkpoints.values()))
    if not common or not others:
        had = "; ".join(f"{name}: {', '.join(map(str, own)) or 'none'}" for name, own in checkpoints.items())
        raise SystemExit(f"--weights needs two runs or more with a checkpoint-N of the same step; found: {had}.")
    for name in others:
        differences = weight_differences(checkpoints[first][max(common)], checkpoints[name][max(common)])
        runs[name]["weights"] = {"step": max(common), **differences}


def weight_differences(first: Path, other: Path) -> dict[str, Any]:
    """How far the weights in two folders are apart, drafters' or adapters'."""
    tensors, others = read_tensors(first), read_tensors(other)
    different = {n for n in tensors.keys() | others.keys() if n not in tensors or n not in others}
    different |= {n for n in tensors.keys() & others.keys() if tensors[n].shape != others[n].shape}
    if different or not tensors:
        raise SystemExit(f"{other} does not hold the tensors of {first}; different are {sorted(different)[:3]}.")
    squares, reference, largest, largest_in = 0.0, 0.0, -1.0, ""
    for name in sorted(name for name in tensors if tensors[name].numel()):
        values, difference = tensors[name].double(), others[name].double() - tensors[name].double()
        squares, reference = squares + difference.square().sum().item(), reference + values.square().sum().item()
        if not math.isfinite(squares + reference):
            raise SystemExit(f"{name} is not finite in {first} or {other}.")
        if difference.abs().max().item() > largest:
            largest, largest_in = difference.abs().max().item(), name
    relative = math.sqrt(squares / reference) if reference else math.sqrt(squares)
    return {"relative_difference": relative, "largest_difference": largest, "largest_in": largest_in}


def read_tensors(folder: Path) -> dict[str, Any]:
    """The tensors in a folder, those of an adapter if there is one."""
    from safetensors.torch import load_file

    adapter = folder / "adapter_model.safetensors"
    paths = [adapter] if adapter.exists() else sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def compare_losses(run: dict[str, Any], first: dict[str, Any]) -> str:
    """The largest difference over logs of the same steps, which is also kept with the run's figures."""
    losses = first.get("losses", {})
    differences = [abs(loss - losses[steps]) for steps, loss in run["losses"].items() if steps in losses]
    # A maximum passes over what is not a number.
    largest = math.nan if any(map(math.isnan, differences)) else max(differences, default=None)
    run["largest_loss_difference"] = largest
    same = f"largest difference {largest:.3g}" if largest is not None else "no log of the same steps"
    return f"{same} in {len(differences)} logs" if differences else same


def print_run(name: str, run: dict[str, Any], first: dict[str, Any]) -> None:
    """A line of the table, and a line for each kind of copy in the profile and for the weights."""
    if "not_measured" in run:
        print(f"{name[-32:]:32} not measured: {run['not_measured']}")
    else:
        row = " ".join(f"{run.get(f'{part}_seconds', 0):8.4f}" for part in PARTS)
        rate, said = run.get("tokens_per_second", 0), compare_losses(run, first)
        print(f"{name[-32:]:32} {row} {run['ratio']:7.3f} {rate:9.1f}  {run['steps']:5}  {said}")
    for kind, copy in run.get("copies", {}).items():
        share = copy["covered_seconds"] / copy["seconds"] if copy["seconds"] else 0.0
        at_link = copy["gigabytes"] * 1e9 / LINK_BYTES_PER_SECOND
        print(
            f"  {kind}: {copy['count']} copies, {copy['gigabytes']:.3f} GB in {copy['seconds']:.4f} s, "
            f"{share:.0%} of it under the drafter's kernels; {at_link:.4f} s at 22 GB/s"
        )
    if "weights" in run:
        weights = run["weights"]
        print(
            f"  weights after step {weights['step']}: relative difference {weights['relative_difference']:.3g}, "
            f"largest {weights['largest_difference']:.3g} in {weights['largest_in']}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="Output folders of runs.")
    parser.add_argument("--skip", type=int, default=3, help="Steps left out while the pipe fills.")
    parser.add_argument("--weights", action="store_true", help="Compare the weights with the first run's.")
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    options = parser.parse_args(argv)
    runs: dict[str, dict[str, Any]] = {}
    for folder in options.folders:
        try:
            runs[str(folder)] = read_run(folder, options.skip)
        except (SystemExit, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if not options.weights:
                raise SystemExit(f"{folder} is not measured: {error!r}") from error
            runs[str(folder)] = {"not_measured": f"{error!r}"}
    if options.weights:
        add_weights(runs)
    head = " ".join(f"{part:>8}" for part in PARTS)
    print(f"{'run':32} {head} {'ratio':>7} {'tokens/s':>9}  steps  losses")
    for name, run in runs.items():
        print_run(name, run, next(iter(runs.values())))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
