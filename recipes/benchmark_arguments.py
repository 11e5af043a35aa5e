# SPDX-License-Identifier: Apache-2.0
"""The benchmark's options."""

from dataclasses import dataclass, field

from benchmark_peers import PEERS
from benchmark_variants import OPTIMIZERS, VARIANTS, check_variant


PARTS = ("target", "transfer", "drafter", "step")


@dataclass
class BenchmarkArguments:
    """What is timed, at which shape, and how often."""

    shape: str | None = field(
        default=None,
        metadata={"help": "tiny, smollm2-135m or qwen3.6-27b; by default the last on a GPU, else the first."},
    )
    parts: str = field(default="drafter", metadata={"help": f"Commas between some of {', '.join(PARTS)}."})
    num_tokens: int | None = field(default=None, metadata={"help": "Tokens of the row; the shape's own if unset."})
    num_anchors: int | None = field(default=None, metadata={"help": "Blocks of the row; the shape's own if unset."})
    cases: str | None = field(default=None, metadata={"help": "Several rows in one run: 2048x512,8192x1536."})
    sweep: bool = field(default=False, metadata={"help": "Rows and anchors from small to large, as a table."})
    num_documents: int = field(default=1, metadata={"help": "Documents of the row."})
    objective: str = field(default="cross_entropy", metadata={"help": "cross_entropy or dpace."})
    context_noise: float = field(default=0.0, metadata={"help": "Half-width of the noise on the hidden states."})
    full_attention: bool = field(default=False, metadata={"help": "Make all layers of the drafter full."})
    bf16: bool | None = field(
        default=None, metadata={"help": "bf16 autocast over fp32 masters, a bf16 target; by default on a GPU."}
    )
    compile: bool = field(default=False, metadata={"help": "Compile the drafter's layers, as training on a GPU does."})
    variants: str = field(
        default="plain",
        metadata={"help": f"Commas between some of {', '.join(VARIANTS)}; each further one against the first."},
    )
    optimizer: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "adamw",
            "help": f"Also time the step with clipping and some of {', '.join(OPTIMIZERS)} (adamw if none is named).",
        },
    )
    peers: str | None = field(default=None, metadata={"help": f"Commas between some of {', '.join(PEERS)}."})
    repeats: int = field(default=10, metadata={"help": "Timed steps, of which the median is reported."})
    warmup: int = field(default=2, metadata={"help": "Steps between the first one and those that are timed."})
    checked_blocks: int = field(
        default=16, metadata={"help": "Blocks whose loss and gradients are held against the naive twin; 0 for none."}
    )
    recompile: bool = field(
        default=True, metadata={"help": "Compile anew for every case, as training at that shape would."}
    )
    profile: bool = field(default=False, metadata={"help": "Also list the drafter's step by kernel."})
    epoch_tokens: float = field(default=1.64e9, metadata={"help": "Tokens of an epoch, for its hours."})
    device: str | None = field(default=None, metadata={"help": "The drafter's device; a GPU if any."})
    target_device: str | None = field(default=None, metadata={"help": "The target's device; the second GPU if any."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the results."})

    def __post_init__(self) -> None:
        known_words = {"parts": PARTS, "peers": tuple(PEERS), "optimizer": tuple(OPTIMIZERS)}
        for name, known in known_words.items():
            unknown = set(words(getattr(self, name))) - set(known)
            if unknown:
                raise ValueError(f"{name} has {sorted(unknown)}; choose from {', '.join(known)}, with commas between.")
        if not words(self.variants):
            raise ValueError(f"variants names none; choose from {', '.join(VARIANTS)}.")
        for variant in words(self.variants):
            check_variant(variant)
        for name, minimum in (("repeats", 1), ("warmup", 0), ("num_documents", 1), ("checked_blocks", 0)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {minimum}.")
        if (self.cases or self.sweep) and (self.num_tokens or self.num_anchors):
            raise ValueError("num_tokens and num_anchors name one case; leave them out beside cases or sweep.")


def words(text: str | None) -> list[str]:
    """What stands between commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]
