# SPDX-License-Identifier: Apache-2.0
"""The benchmark's options."""

import importlib.util
from dataclasses import dataclass, field

import torch
from benchmark_peers import PEERS
from benchmark_shapes import Case, Shape, shapes
from benchmark_variants import NO_TORCHAO, OPTIMIZERS, VARIANTS, check_variant, float8_recipe


PARTS = ("target", "transfer", "drafter", "step")
# The others compare with the target's distribution, which the drafter's part does not have.
OBJECTIVES = ("cross_entropy", "dpace")


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
    objective: str = field(default="cross_entropy", metadata={"help": f"{' or '.join(OBJECTIVES)}."})
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
        for name, known in (("shape", (None, *shapes())), ("objective", OBJECTIVES)):
            if getattr(self, name) not in known:
                choices = ", ".join(filter(None, known))
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {choices}.")
        for case in self.find_cases():
            case.document_lengths(self.num_documents, self.find_shape().drafter["block_size"])
        self._check_devices()
        self._check_installed()
        self._check_peers()

    @property
    def drafter_device(self) -> torch.device:
        return torch.device(self.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))

    @property
    def shape_name(self) -> str:
        return self.shape or ("qwen3.6-27b" if self.drafter_device.type == "cuda" else "tiny")

    def find_shape(self) -> Shape:
        return shapes()[self.shape_name]

    def find_cases(self) -> list[Case]:
        """The rows that are timed."""
        shape = self.find_shape()
        if self.sweep:
            return shape.sweep
        if self.cases:
            return [Case.parse(word) for word in words(self.cases)]
        return [Case(self.num_tokens or shape.case.num_tokens, self.num_anchors or shape.case.num_anchors)]

    def _check_devices(self) -> None:
        for name in ("device", "target_device"):
            device = torch.device(getattr(self, name) or "cpu")
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                raise ValueError(f"{name} is {device}, and torch sees {torch.cuda.device_count()} GPUs here.")

    def _check_installed(self) -> None:
        """Refuse at once what would only be missed after the first case's compilation."""
        for peer in words(self.peers):
            if importlib.util.find_spec(peer) is None:
                raise ValueError(
                    f"peers has {peer}, which is not installed. recipes/qwen3.6-27b/README.md says how to install it "
                    'apart from this package ("Benchmark"); or leave it out.'
                )
        needs_torchao = [word for word in words(self.optimizer) if word == "adamw_8bit"]
        needs_torchao += [variant for variant in words(self.variants) if float8_recipe(variant)]
        if needs_torchao and importlib.util.find_spec("torchao") is None:
            raise ValueError(NO_TORCHAO.format(", ".join(needs_torchao), "it is not installed"))

    def _check_peers(self) -> None:
        peers = words(self.peers)
        if peers and "drafter" not in words(self.parts):
            raise ValueError(f"peers take the drafter's step: add drafter to parts, which is {self.parts!r}.")
        if "specforge" in peers and self.num_documents > 1:
            raise ValueError(
                f"num_documents is {self.num_documents}, and specforge would let documents see each other: the work "
                "would not be the same. Give one document, or leave this peer out."
            )


def words(text: str | None) -> list[str]:
    """What stands between commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]
