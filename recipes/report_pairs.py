# SPDX-License-Identifier: Apache-2.0
"""Compare finished runs of the training recipe by their own logs: step, halves, wait, copies, losses.

    python recipes/report_pairs.py outputs/depth0 outputs/depth1 outputs/depth2 [--output pairs.json] [--skip 3]
    python recipes/report_pairs.py outputs/two-pairs outputs/one-pair --weights

Each folder holds the `trainer_state.json` of a run with one micro-batch a step; the first one is what losses are
compared with. A log is the mean of its steps, so logs that hold a step in turn, a profiled one or one of the first few
behind either are left out whole: the rarer the logs, the more steps a run needs. `ratio` is the step over the slower
half measured alone in the same run (`--measure_alone_steps`), or over the slower half of its own steps where none was
measured alone; only a step of one micro-batch has such a ratio. Tokens per second are those of all ranks.

With `--weights` the weights of the newest `checkpoint-N` that all runs have are compared with the first run's: the
norm of the difference over that of the weights, and the largest difference of a single one. Runs without logs that can
be measured are compared as well.
"""

import argparse
import json
import math
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
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
    try:
        return figures_of_logs(folder, state, skip)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SystemExit(
            f"What {folder} holds as trainer_state.json and profile_copies.json is broken, or not of the training "
            f"recipe ({error!r}): give the output_dir of one of its runs."
        ) from error


def figures_of_logs(folder: Path, state: Path, skip: int) -> dict[str, Any]:
    # Where the time goes stands in the details of an entry.
    history = [{**entry, **entry.get("details", {})} for entry in json.loads(state.read_text())["log_history"]]
    logs = read_logs(history)
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


def figures_of(folder: Path, skip: int, may_lack_logs: bool) -> dict[str, Any]:
    """Figures of one run; only why there are none, where its weights can be compared without them."""
    try:
        return read_run(folder, skip)
    except SystemExit as reason:
        if not may_lack_logs:
            raise
        return {"not_measured": str(reason)}


def add_weights(runs: dict[str, dict[str, Any]]) -> None:
    """Compare the weights of the newest checkpoint that all runs have with the first run's."""
    # Without weights the report needs no torch, and is there at once.
    from dflash_hf.checkpointing import checkpoints_in
    from dflash_hf.cli import errors_in_one_line

    first, *others = runs
    with errors_in_one_line():
        if not others:
            raise ValueError(f"--weights compares runs with the first one; {first} is the only one. Give several.")
        checkpoints = {name: checkpoints_in(name) for name in runs}
        common = set.intersection(*map(set, checkpoints.values()))
        if not common:
            had = "; ".join(f"{name}: {', '.join(map(str, own)) or 'none'}" for name, own in checkpoints.items())
            raise ValueError(
                f"There is no step of which all runs have a checkpoint-N to be compared ({had}). Train each with "
                "--save_strategy steps, the same --save_steps and, since weights are enough, --save_only_model true."
            )
        step = max(common)
        for name in others:
            differences = weight_differences(checkpoints[first][step], checkpoints[name][step])
            runs[name]["weights"] = {"step": step, **differences}


def weight_differences(first: Path, other: Path) -> dict[str, Any]:
    """How far the weights in two folders are apart, drafters' or adapters', read one tensor after the other."""
    import torch

    squares, reference, largest, largest_in = 0.0, 0.0, -1.0, ""
    with ExitStack() as stack:
        tensors, others = (open_tensors(folder, stack) for folder in (first, other))
        shapes = [{name: file.get_slice(name).get_shape() for name, file in t.items()} for t in (tensors, others)]
        if shapes[0] != shapes[1]:
            different = sorted(n for n in tensors.keys() | others.keys() if shapes[0].get(n) != shapes[1].get(n))
            raise ValueError(
                f"{other} does not hold the tensors of {first}: {len(different)} are missing in one of them or of "
                f"another shape, such as {', '.join(different[:3])}. Compare runs of the same drafter."
            )
        for name in sorted(name for name, shape in shapes[0].items() if math.prod(shape)):
            values = tensors[name].get_tensor(name).float()
            difference = others[name].get_tensor(name).float().sub_(values)
            squares += torch.linalg.vector_norm(difference, dtype=torch.float64).item() ** 2
            reference += torch.linalg.vector_norm(values, dtype=torch.float64).item() ** 2
            if not math.isfinite(squares + reference):
                raise ValueError(f"{name} is not finite in {first} or {other}: there is no difference to speak of.")
            largest, largest_in = max((largest, largest_in), (difference.abs().max().item(), name), key=itemgetter(0))
    relative = math.sqrt(squares / reference) if reference else math.sqrt(squares)
    return {"relative_difference": relative, "largest_difference": largest, "largest_in": largest_in}


def open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor in a folder, of an adapter if there is one."""
    from safetensors import SafetensorError, safe_open

    adapter = folder / "adapter_model.safetensors"
    paths = [adapter] if adapter.exists() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no weights (*.safetensors).")
    try:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
    except SafetensorError as error:
        raise ValueError(f"The weights in {folder} cannot be read: {error}") from error
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a dictionary)


def print_run(name: str, run: dict[str, Any]) -> None:
    """A line of the table, and a line for each kind of copy in the profile and for the weights."""
    if "not_measured" in run:
        print(f"{name[-32:]:32} not measured: {run['not_measured']}")
    else:
        parts = ("step", "target", "drafter", "wait", "copy")
        row = " ".join(f"{run.get(f'{part}_seconds', 0):8.4f}" for part in parts)
        rate, said = run.get("tokens_per_second", 0), run["compared_losses"]
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


def compare_losses(run: dict[str, Any], first: dict[str, Any]) -> None:
    # Means over the same steps.
    losses = first.get("losses", {})
    both = [(loss, losses[steps]) for steps, loss in run["losses"].items() if steps in losses]
    differences = [abs(a - b) for a, b in both]
    # A maximum passes over what is not a number.
    largest = math.nan if any(map(math.isnan, differences)) else max(differences, default=None)
    run["largest_loss_difference"] = largest
    run["compared_losses"] = (
        "no log of the same steps" if largest is None else f"largest difference {largest:.3g} in {len(both)} logs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="Output folders of runs.")
    parser.add_argument(
        "--skip",
        type=int,
        default=3,
        help="Steps left out while the pipe fills, at the start and behind steps in turn or profiled.",
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="Compare the weights with the first run's, at the newest checkpoint-N that all have.",
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    options = parser.parse_args()
    runs = {str(folder): figures_of(folder, options.skip, options.weights) for folder in options.folders}
    if options.weights:
        add_weights(runs)
    head = " ".join(f"{part:>8}" for part in ("step", "target", "drafter", "wait", "copy"))
    print(f"{'run':32} {head} {'ratio':>7} {'tokens/s':>9}  steps  losses")
    for name, run in runs.items():
        if "losses" in run:
            compare_losses(run, next(iter(runs.values())))
        print_run(name, run)
    if options.output:
        try:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(runs, indent=2) + "\n")
        except OSError as error:
            raise SystemExit(f"--output {options.output} cannot be written: {error}") from error


if __name__ == "__main__":
    main()
