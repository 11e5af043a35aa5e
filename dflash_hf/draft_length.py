# SPDX-License-Identifier: Apache-2.0
"""How many tokens to draft: the acceptance length of shorter blocks beside what their rounds cost.

Drafts change with the length of their block, whose slots see one another, so every length is walked. A round that
drafts k tokens for B sequences commits B * tau(k) tokens and takes a draft and a forward of the target over k + 1
tokens of each. Costs are those of transformers here, or given: a server has its own.
"""

import json
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .acceptance import AcceptanceReport, new_figure, number, plot_label, short_names, table, walked_length
from .generation import DecodingState, Sampling, evaluation_mode, target_forward
from .modeling_dflash import DFlashDraftModel


# Rounds that are timed, after some that warm up.
ROUNDS, WARM_UP = 8, 3


@dataclass(frozen=True)
class RoundCost:
    """Seconds of a round for `batch_size` sequences; 0 drafts are a forward of one token, without a drafter."""

    batch_size: int
    num_draft_tokens: int
    target_seconds: float
    draft_seconds: float = 0.0


@dataclass(frozen=True)
class DraftLengths:
    """Acceptance lengths by the number of drafts in a block, and the costs of rounds."""

    acceptance_lengths: dict[int, float]
    costs: list[RoundCost]

    def tokens_per_second(self) -> dict[int, dict[int, float]]:
        """Expected tokens/s of all sequences, by batch size and number of drafts; 0 drafts are the target alone.

        Costs between two known numbers of drafts are interpolated; what lies outside them is left out.
        """
        speeds: dict[int, dict[int, float]] = {}
        for size in sorted({cost.batch_size for cost in self.costs}):
            rows = sorted((c for c in self.costs if c.batch_size == size), key=lambda c: c.num_draft_tokens)
            known = [cost.num_draft_tokens for cost in rows]
            seconds = [cost.target_seconds + cost.draft_seconds for cost in rows]
            speeds[size] = {
                count: size * tau / float(np.interp(count, known, seconds))
                for count, tau in sorted({0: 1.0, **self.acceptance_lengths}.items())
                if known[0] <= count <= known[-1]
            }
        return speeds

    def best(self) -> dict[int, int]:
        """The fastest number of drafts by batch size; 0 where drafting does not pay."""
        return {size: max(own, key=lambda k: own[k]) for size, own in self.tokens_per_second().items()}

    def schedule(self) -> list[list[int]]:
        """vLLM's `num_speculative_tokens_per_batch_size`: first and last batch size (inclusive) and their drafts.

        A measured size stands for all above the one before; vLLM goes on with the last entry above all of them.
        """
        entries: list[list[int]] = []
        for size, count in self.best().items():
            if entries and entries[-1][2] == count:
                entries[-1][1] = size
            else:
                entries.append([entries[-1][1] + 1 if entries else 1, size, count])
        return entries

    def vllm_command(self, target: str, drafter: str) -> str:
        """The command that serves a target with the best numbers of drafts, which only vLLM's V2 runner varies."""
        schedule, flags = self.schedule(), ""
        if most := max(count for *_, count in schedule):
            speculative: dict[str, Any] = {"method": "dflash", "model": drafter, "num_speculative_tokens": most}
            speculative |= {"num_speculative_tokens_per_batch_size": schedule} if len(schedule) > 1 else {}
            flags = f" --speculative-config {shlex.quote(json.dumps(speculative))}"
        return f"vllm serve {shlex.quote(target)}{flags}"

    def to_dict(self) -> dict[str, Any]:
        """All of it in JSON types; the costs can be read again by [`read_costs`]."""
        told = {"tokens_per_second": self.tokens_per_second(), "best": self.best()}
        return asdict(self) | told | {"num_speculative_tokens_per_batch_size": self.schedule()}


def read_costs(path: str | Path) -> list[RoundCost]:
    """Costs from a JSON file `{"costs": [{"batch_size", "num_draft_tokens", "target_seconds", "draft_seconds"}, ..]}`.

    Rows of 0 drafts are the target alone. Where whole rounds were timed, `draft_seconds` are left out. A `ValueError`
    for another form.
    """
    try:
        costs = [RoundCost(**row) for row in json.loads(Path(path).read_text(encoding="utf-8"))["costs"]]
        if min(min(c.batch_size, c.num_draft_tokens + 1, c.target_seconds) for c in costs) <= 0:
            raise ValueError("a number is too small")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the costs of rounds ({error!r}); see results.json.") from error
    return costs


def foretell(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    report: AcceptanceReport,
    draft_lengths: Sequence[int],
    batch_sizes: Sequence[int] = (1,),
    costs: list[RoundCost] | None = None,
) -> DraftLengths:
    """Walk a report's answers with each number of drafts that the drafter has, and time rounds where no costs are."""
    possible = [count for count in draft_lengths if count < (drafter.config.block_size or 0)]
    walked = {count: walked_length(target, drafter, report, count, progress=True) for count in possible}
    # None where every answer ended with its first token.
    taus = {count: tau for count, tau in walked.items() if tau == tau}
    if costs is None:
        # Rounds in the middle of the answers.
        lengths = [len(prompt.prompt_ids) + len(prompt.output_ids) // 2 for prompt in report.prompts]
        costs = measure_costs(target, drafter, taus, batch_sizes, int(statistics.mean(lengths)))
    return DraftLengths(taus, costs)


@torch.no_grad()
def measure_costs(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    acceptance_lengths: Mapping[int, float],
    batch_sizes: Sequence[int],
    context_length: int,
) -> list[RoundCost]:
    """Time rounds after contexts of random tokens, for each batch size without drafts and with each number of them.

    Rounds commit the acceptance length, rounded, since a hybrid target reads some of the committed tokens again.
    """
    costs = []
    for size in batch_sizes:
        ids = torch.randint(0, target.config.get_text_config().vocab_size, (size, context_length)).to(target.device)
        for count, tau in {0: 1.0, **acceptance_lengths}.items():
            with evaluation_mode(target, drafter), DecodingState(target, drafter, True, count or None) as state:
                state.prefill(ids)
                rounds = [_time_round(state, ids[:, -1:], count, round(tau)) for _ in range(WARM_UP + ROUNDS)]
            costs.append(RoundCost(size, count, *map(statistics.median, zip(*rounds[WARM_UP:], strict=True))))
    return costs


def _time_round(state: DecodingState, anchors: torch.Tensor, num_drafts: int, committed: int) -> tuple[float, float]:
    """Seconds of the target's part of a round and of the draft."""
    times = [_now(anchors.device)]
    if num_drafts:
        drafts, *_ = state.propose(anchors, Sampling())
        times.append(_now(anchors.device))
        state.verify(anchors, drafts)
        state.commit(drafts.new_zeros(len(anchors), committed))
    else:
        target_forward(state.target, state.drafter, anchors, 1, cache=state.target_cache, use_cache=True)
    times.append(_now(anchors.device))
    return times[-1] - times[-2], times[-2] - times[0]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def markdown(lengths: Mapping[str, DraftLengths], target: str) -> str:
    """A table for each drafter, the best number of drafts and the command for vLLM."""
    parts = []
    for name, own in lengths.items():
        speeds = own.tokens_per_second()
        heads = ["drafted tokens", "acceptance length", *(f"tokens/s, {size} at once" for size in speeds)]
        rows = [
            [str(count), number(tau), *(number(part.get(count), 1) for part in speeds.values())]
            for count, tau in {0: 1.0, **own.acceptance_lengths}.items()
        ]
        best = ", ".join(f"{count} for {size} at once" for size, count in own.best().items())
        parts.append(f"Drafted tokens of {name}, expected from their acceptance and the cost of rounds:")
        parts += [table(heads, rows), f"Best: {best}.", f"```bash\n{own.vllm_command(target, name)}\n```"]
    return "\n\n".join(parts) + "\n"


def plot(lengths: Mapping[str, DraftLengths], path: Path, target: str) -> None:
    """Expected tokens/s over the number of drafts, a panel for each drafter and a line for each batch size."""
    figure, panels = new_figure(len(lengths))
    figure.suptitle(plot_label(short_names([target])[0]))
    for name, own, axes in zip(short_names(lengths), lengths.values(), panels, strict=True):
        for size, speeds in own.tokens_per_second().items():
            axes.plot(list(speeds), list(speeds.values()), marker=".", label=f"{size} at once")
        axes.set(xlabel="drafted tokens", ylabel="expected tokens/s", yscale="log", title=plot_label(name))
        axes.legend()
    figure.savefig(path, dpi=120)
