# SPDX-License-Identifier: Apache-2.0
"""A drafter of general chats adapted to code answers, by an adapter and whole: gain, loss, memory and time of both.

    python recipes/smollm2-135m/adaptation.py --target FOLDER --general train.jsonl.gz --general_eval dev.jsonl.gz

`general` and `general_eval` hold chats that the target answered. The target answers code prompts (code_prompts.py)
itself. Acceptance lengths are those of the teacher-forced walk over the target's greedy answers: what greedy decoding
commits. Learning rates are chosen on conditions that are neither trained nor tested on. Results: `adaptation.json`.
"""

import gc
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from code_prompts import code_prompts
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf import (
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    FrozenTarget,
    read_completions,
    tokenize_completions,
)
from dflash_hf.cli import parse_config
from dflash_hf.training.drafter_adapters import lora_config


@dataclass
class AdaptationArguments:
    target: str = field(metadata={"help": "Folder or Hub id of SmolLM2-135M-Instruct."})
    general: str = field(metadata={"help": "Chats that the target answered, to train the first drafter on."})
    general_eval: str = field(metadata={"help": "Other chats that it answered greedily, to measure on."})
    output_dir: str = field(default="outputs/adaptation", metadata={"help": "Folder of drafters and results."})
    num_general: int = field(default=6000, metadata={"help": "Chats of general."})
    num_general_eval: int = field(default=200, metadata={"help": "Chats of general_eval."})
    num_prompts: int | None = field(default=None, metadata={"help": "Code prompts of each split; all if unset."})
    replay: int = field(default=300, metadata={"help": "General chats among the code answers."})
    max_new_tokens: int = field(default=192, metadata={"help": "Tokens of a code answer."})
    num_layers: int = field(default=3, metadata={"help": "Layers of the drafter."})
    num_taps: int = field(default=5, metadata={"help": "Target layers that it reads."})
    block_size: int = field(default=8, metadata={"help": "Slots per block."})
    mask_token_id: int = field(default=15, metadata={"help": "Token id of a slot to be drafted."})
    base_epochs: float = field(default=3.0, metadata={"help": "Passes over the general chats."})
    epochs: float = field(default=6.0, metadata={"help": "Passes over the adaptation's documents."})
    lora_rank: int = field(default=32, metadata={"help": "Rank of the adapter."})
    lora_rates: list[float] = field(default_factory=lambda: [1e-3, 3e-3], metadata={"help": "Tried for the adapter."})
    whole_rates: list[float] = field(default_factory=lambda: [1e-4, 3e-4], metadata={"help": "Tried for the whole."})
    row_length: int = field(default=2048, metadata={"help": "Tokens of a packed row."})
    rows_per_step: int = field(default=8, metadata={"help": "Rows of a step of the first drafter."})
    bf16: bool = field(default=True, metadata={"help": "Autocast; a GPU's."})
    seed: int = field(default=0, metadata={"help": "Of weights, order and anchors."})


def main() -> None:
    arguments = parse_config((AdaptationArguments,), description=__doc__.split("\n")[0])[0]
    study = Study(arguments)
    results: dict[str, Any] = {"settings": vars(arguments), "hardware": study.hardware}
    folder = Path(arguments.output_dir)
    results["general"] = study.train_first(folder / "general")
    for kind, rates in (("adapter", arguments.lora_rates), ("whole", arguments.whole_rates)):
        results[kind] = [study.adapt(folder / "general", kind, rate) for rate in rates]
        (folder / "adaptation.json").write_text(json.dumps(results, indent=1) + "\n")
    summary = summarise(results)
    results["summary"] = summary
    (folder / "adaptation.json").write_text(json.dumps(results, indent=1) + "\n")
    report(results, summary)


class Study:
    """Target, documents and the two kinds of training.

    Args:
        arguments: The settings.
    """

    def __init__(self, arguments: AdaptationArguments):
        self.arguments, device = arguments, "cuda" if torch.cuda.is_available() else "cpu"
        self.hardware = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        self.tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        dtype = torch.bfloat16 if arguments.bf16 else torch.float32
        model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).to(device).eval()
        self.config = DFlashDraftConfig.from_target_config(
            model.config,
            num_hidden_layers=arguments.num_layers,
            num_taps=arguments.num_taps,
            block_size=arguments.block_size,
            mask_token_id=arguments.mask_token_id,
        )
        general = read_completions(arguments.general)
        self.general = self.documents(general[: arguments.num_general], model)
        replay = (
            self.documents(general[arguments.num_general :][: arguments.replay], model) if arguments.replay else []
        )
        code = {
            split: self.documents(answered(model, self.tokenizer, prompts(arguments, split), arguments), model)
            for split in ("train", "validation", "test")
        }
        self.adaptation = [*code["train"], *replay]
        evaluation = read_completions(arguments.general_eval)[: arguments.num_general_eval]
        self.evaluations = {
            "general": self.documents(evaluation, model),
            "code_validation": code["validation"],
            "code_test": code["test"],
        }
        # Without weights below the last tap: what trains is measured, not the target's unused end.
        self.target = FrozenTarget(model, self.config.target_layer_ids or [])

    def documents(self, rows: list[dict], model: PreTrainedModel) -> Any:
        eos = model.generation_config.eos_token_id
        return tokenize_completions(rows, self.tokenizer, max_length=self.arguments.row_length, eos_token_ids=eos)

    def trainer(self, drafter: DFlashDraftModel, folder: Path, documents: Any, rows: int, **kwargs: Any):
        peft_config = kwargs.pop("peft_config", None)
        args = DFlashTrainingArguments(
            output_dir=str(folder),
            row_length=self.arguments.row_length,
            per_device_train_batch_size=rows,
            bf16=self.arguments.bf16,
            # Kernels that need no compilation: each variant would compile anew for a minute.
            drafter_attn_implementation="sdpa",
            compile_layers=False,
            logging_steps=20,
            report_to="none",
            save_strategy="no",
            seed=self.arguments.seed,
            **kwargs,
        )
        return DFlashTrainer(drafter, self.target, args, train_dataset=documents, peft_config=peft_config)

    def measured(self, trainer: DFlashTrainer) -> dict[str, float]:
        return {
            name: trainer.evaluate(documents)["eval_acceptance_length"] for name, documents in self.evaluations.items()
        }

    def train_first(self, folder: Path) -> dict[str, Any]:
        """The drafter of general chats."""
        torch.manual_seed(self.arguments.seed)
        trainer = self.trainer(
            DFlashDraftModel(self.config),
            folder,
            self.general,
            self.arguments.rows_per_step,
            num_train_epochs=self.arguments.base_epochs,
            learning_rate=1e-3,
        )
        result = timed(trainer)
        trainer.save_model()
        return result | {"acceptance_length": self.measured(trainer)}

    def adapt(self, base: Path, kind: str, rate: float) -> dict[str, Any]:
        """The drafter adapted to code, by an adapter or whole."""
        gc.collect()
        adapter = kind == "adapter"
        # As published drafters are stored; the whole is trained on fp32 masters of it, the adapter beside it as it is.
        stored = torch.bfloat16 if self.arguments.bf16 else torch.float32
        trainer = self.trainer(
            DFlashDraftModel.from_pretrained(base, dtype=stored),
            Path(self.arguments.output_dir) / f"{kind}-{rate:g}",
            self.adaptation,
            1,
            num_train_epochs=self.arguments.epochs,
            learning_rate=rate,
            gradient_accumulation_steps=2,
            peft_config=lora_config(self.arguments.lora_rank) if adapter else None,
        )
        result = timed(trainer)
        trainer.save_model()
        result["trained_parameters"] = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        return result | {"learning_rate": rate, "acceptance_length": self.measured(trainer)}


def prompts(arguments: AdaptationArguments, split: str) -> list[str]:
    return code_prompts(split)[: arguments.num_prompts]


@torch.no_grad()
def answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], arguments: AdaptationArguments
) -> list[dict]:
    """The target's greedy answers as rows of completions, with the token ids it wrote."""
    tokenizer.padding_side = "left"
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    rows = []
    for start in tqdm(range(0, len(texts), 96), desc="answering"):
        chats = [[{"role": "user", "content": text}] for text in texts[start : start + 96]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=arguments.max_new_tokens)
        for chat, ids in zip(chats, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            stop = next((i + 1 for i, token in enumerate(ids) if token in ends), None)
            ids = ids[:stop]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            answer = {"role": "assistant", "content": text}
            reason = "length" if stop is None else "stop"
            rows.append({"messages": [*chat, answer], "completion_token_ids": ids, "finish_reason": reason})
    return rows


def timed(trainer: DFlashTrainer) -> dict[str, Any]:
    """Train, with seconds and the GPU memory that training adds to what the target holds."""
    on_gpu = torch.cuda.is_available()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    memory = {"peak_gb": peak / 1e9, "held_before_gb": held / 1e9}
    return {
        "seconds": seconds,
        "steps": trainer.state.global_step,
        "seconds_per_step": seconds / trainer.state.global_step,
    } | memory


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """The rate of each kind that is best on the validation prompts, its gain and its loss."""
    base = results["general"]["acceptance_length"]
    summary: dict[str, Any] = {}
    for kind in ("adapter", "whole"):
        best = max(results[kind], key=lambda run: run["acceptance_length"]["code_validation"])
        lengths = best["acceptance_length"]
        summary[kind] = {
            "learning_rate": best["learning_rate"],
            "gain_on_code": lengths["code_test"] - base["code_test"],
            "change_on_general": lengths["general"] / base["general"] - 1,
        }
    whole = summary["whole"]["gain_on_code"]
    summary["share_of_gain"] = summary["adapter"]["gain_on_code"] / whole if whole else float("nan")
    return summary


def report(results: dict[str, Any], summary: dict[str, Any]) -> None:
    print("\n| drafter | rate | general | code, validation | code, test | parameters | seconds | s/step | peak GB |")
    print("|---|---|---|---|---|---|---|---|---|")
    runs = [("of general chats", results["general"])]
    runs += [(f"adapted: {kind}", run) for kind in ("adapter", "whole") for run in results[kind]]
    for name, run in runs:
        lengths = " | ".join(f"{run['acceptance_length'][k]:.3f}" for k in ("general", "code_validation", "code_test"))
        cost = f"{run['seconds']:.1f} | {run['seconds_per_step']:.3f} | {run['peak_gb']:.2f}"
        print(
            f"| {name} | {run.get('learning_rate', '')} | {lengths} | {run.get('trained_parameters', '')} | {cost} |"
        )
    print(
        f"\nThe adapter reaches {summary['share_of_gain']:.0%} of the whole drafter's gain on code "
        f"({summary['adapter']['gain_on_code']:+.3f} of {summary['whole']['gain_on_code']:+.3f}); on general chats it "
        f"changes by {summary['adapter']['change_on_general']:+.1%}, the whole drafter by "
        f"{summary['whole']['change_on_general']:+.1%}. {results['hardware']}."
    )


if __name__ == "__main__":
    main()
