# SPDX-License-Identifier: Apache-2.0
"""A drafter of general chats adapted to code answers, by an adapter and whole: gain, loss, memory and time of both.

    python recipes/smollm2-135m/adaptation.py --target FOLDER --general train.jsonl.gz --general_eval dev.jsonl.gz

`general` and `general_eval` hold chats that the target answered. The target answers code prompts (code_prompts.py)
itself. Acceptance lengths are those of the teacher-forced walk over the target's greedy answers: what greedy decoding
commits. Learning rates are chosen on code prompts and general chats that are neither trained nor tested on: the best
on code of those that keep 98.5% of the acceptance length on general chats, so that others keep 98%. The two kinds of
training take turns, and `adaptation.json` is written after each run, so that a study that is cut short still compares
them.
"""

import gc
import json
import time
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from adaptation_report import KINDS, report, summarise
from code_prompts import SPLITS, code_prompts
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)

from dflash_hf import (
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    FrozenTarget,
    read_completions,
    tokenize_completions,
)
from dflash_hf.adapters import lora_config
from dflash_hf.callbacks import NonFiniteTrainingError
from dflash_hf.cli import parse_config
from dflash_hf.frozen_target import eos_token_ids


@dataclass
class AdaptationArguments:
    target: str = field(metadata={"help": "Folder or Hub id of SmolLM2-135M-Instruct."})
    general: str = field(metadata={"help": "Chats that the target answered, to train the first drafter on."})
    general_eval: str = field(metadata={"help": "Other chats that it answered greedily, to measure on."})
    output_dir: str = field(default="outputs/adaptation", metadata={"help": "Folder of drafters and results."})
    general_drafter: str | None = field(
        default=None, metadata={"help": "Drafter to adapt, in place of a new one of general; it sets the shape."}
    )
    num_general: int = field(default=6000, metadata={"help": "Chats of general."})
    num_general_eval: int = field(
        default=250, metadata={"help": "Chats of general_eval: half to choose rates on, half to test."}
    )
    num_prompts: int | None = field(default=None, metadata={"help": "Code prompts of each split; all if unset."})
    replay: int = field(default=900, metadata={"help": "General chats among the code answers."})
    max_new_tokens: int = field(default=192, metadata={"help": "Tokens of a code answer."})
    num_layers: int = field(default=3, metadata={"help": "Layers of the drafter."})
    num_taps: int = field(default=5, metadata={"help": "Target layers that it reads."})
    block_size: int = field(default=8, metadata={"help": "Slots per block."})
    mask_token_id: int = field(default=15, metadata={"help": "Token id of a slot to be drafted."})
    base_epochs: float = field(default=3.0, metadata={"help": "Passes over the general chats."})
    base_minutes: float | None = field(default=None, metadata={"help": "After which the first drafter is done."})
    epochs: float = field(default=4.0, metadata={"help": "Passes over the adaptation's documents."})
    objective: str = field(default="dpace", metadata={"help": "Of all training; that of the drafter to adapt."})
    lora_rank: int = field(default=64, metadata={"help": "Rank of the adapter."})
    lora_rates: list[float] = field(
        default_factory=lambda: [3e-3, 1.5e-3, 5e-3, 8e-4], metadata={"help": "Tried for the adapter, in this order."}
    )
    whole_rates: list[float] = field(
        default_factory=lambda: [1e-3, 5e-4, 2e-3, 2.5e-4], metadata={"help": "Tried for the whole, in this order."}
    )
    row_length: int = field(default=1024, metadata={"help": "Tokens of a packed row."})
    rows_per_step: int = field(default=16, metadata={"help": "Rows of a step of the first drafter."})
    adapted_rows_per_step: int = field(default=16, metadata={"help": "Rows of a step of an adaptation."})
    bf16: bool = field(default=True, metadata={"help": "Autocast; a GPU's."})
    seed: int = field(default=0, metadata={"help": "Of weights, order and anchors."})


def main() -> None:
    arguments = parse_config((AdaptationArguments,), description=__doc__.split("\n")[0])[0]
    folder = Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(arguments)
    results: dict[str, Any] = {"settings": vars(arguments), "hardware": study.hardware, "adapter": [], "whole": []}
    results["setup_seconds"], base = study.setup_seconds, Path(arguments.general_drafter or folder / "general")
    results["general"] = study.measure(base) if arguments.general_drafter else study.train_first(base)
    write(folder, results)
    for rates in zip_longest(arguments.lora_rates, arguments.whole_rates):
        for kind, rate in zip(KINDS, rates, strict=True):
            if rate is not None:
                results[kind].append(study.adapt(base, kind, rate))
                write(folder, results)
    report(results)


def write(folder: Path, results: dict[str, Any]) -> None:
    """What is known so far, as JSON."""
    results["summary"] = summarise(results)
    (folder / "adaptation.json").write_text(json.dumps(results, indent=1) + "\n")


class Study:
    """Target, documents and the two kinds of training.

    Args:
        arguments: The settings.
    """

    def __init__(self, arguments: AdaptationArguments):
        start, device = time.perf_counter(), "cuda" if torch.cuda.is_available() else "cpu"
        self.arguments = arguments
        self.hardware = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        self.tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        dtype = torch.bfloat16 if arguments.bf16 else torch.float32
        model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).to(device).eval()
        self.config = drafter_config(arguments, model.config)
        general = read_completions(arguments.general)
        self.general = self.documents(general[: arguments.num_general], model)
        replay = (
            self.documents(general[arguments.num_general :][: arguments.replay], model) if arguments.replay else []
        )
        texts = {split: prompts(arguments, split) for split in SPLITS}
        # Together, since a step of generation takes as long for all prompts as for a few.
        answers = iter(answered(model, self.tokenizer, [text for part in texts.values() for text in part], arguments))
        code = {split: self.documents(list(islice(answers, len(part))), model) for split, part in texts.items()}
        self.adaptation = [*code["train"], *replay]
        evaluation = read_completions(arguments.general_eval)[: arguments.num_general_eval]
        middle = len(evaluation) // 2
        self.evaluations = {
            "general_validation": self.documents(evaluation[:middle], model),
            "general_test": self.documents(evaluation[middle:], model),
            "code_validation": code["validation"],
            "code_test": code["test"],
        }
        # The target keeps its unused end; memory is measured as what training adds.
        self.target = FrozenTarget(model, self.config.target_layer_ids or [], compile_target=True)
        self.setup_seconds = time.perf_counter() - start

    def documents(self, rows: list[dict], model: PreTrainedModel) -> Any:
        eos = model.generation_config.eos_token_id
        return tokenize_completions(rows, self.tokenizer, max_length=self.arguments.row_length, eos_token_ids=eos)

    def trainer(
        self,
        drafter: DFlashDraftModel,
        folder: Path,
        documents: Any,
        rows: int,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> DFlashTrainer:
        args = DFlashTrainingArguments(
            output_dir=str(folder),
            row_length=self.arguments.row_length,
            per_device_train_batch_size=rows,
            per_device_eval_batch_size=8,
            bf16=self.arguments.bf16,
            objective=self.arguments.objective,
            # Kernels that need no compilation: each variant would compile anew for a minute.
            drafter_attn_implementation="sdpa",
            compile_layers=False,
            # In turn, so that a step's time is that of its halves alone.
            prefetch_depth=0,
            # Small chunks of logits, so that memory is that of weights and activations.
            loss_chunk_blocks=256,
            logging_steps=50,
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
        before = allocated()
        trainer = self.trainer(
            DFlashDraftModel(self.config),
            folder,
            self.general,
            self.arguments.rows_per_step,
            num_train_epochs=self.arguments.base_epochs,
            learning_rate=1e-3,
        )
        if self.arguments.base_minutes is not None:
            trainer.add_callback(StopAfter(self.arguments.base_minutes * 60))
        result = timed(trainer, before)
        trainer.save_model()
        return result | {"acceptance_length": self.measured(trainer)}

    def measure(self, base: Path) -> dict[str, Any]:
        """A drafter that is there already."""
        drafter, folder = DFlashDraftModel.from_pretrained(base), Path(self.arguments.output_dir) / "general"
        trainer = self.trainer(drafter, folder, self.general, self.arguments.rows_per_step)
        return {"acceptance_length": self.measured(trainer)}

    def adapt(self, base: Path, kind: str, rate: float) -> dict[str, Any]:
        """The drafter adapted to code, by an adapter or whole; with an error where the rate is too high to train."""
        gc.collect()
        before = allocated()
        # As published drafters are stored; the whole is trained on fp32 masters of it, the adapter beside it as it is.
        stored = torch.bfloat16 if self.arguments.bf16 else torch.float32
        trainer = self.trainer(
            DFlashDraftModel.from_pretrained(base, dtype=stored),
            Path(self.arguments.output_dir) / f"{kind}-{rate:g}",
            self.adaptation,
            self.arguments.adapted_rows_per_step,
            peft_config=lora_config(self.arguments.lora_rank) if kind == "adapter" else None,
            num_train_epochs=self.arguments.epochs,
            learning_rate=rate,
        )
        try:
            result = {"learning_rate": rate} | timed(trainer, before)
        except NonFiniteTrainingError as error:
            return {"learning_rate": rate, "error": str(error)}
        trainer.save_model()
        result["trained_parameters"] = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        return result | {"acceptance_length": self.measured(trainer)}


class StopAfter(TrainerCallback):
    """Ends a training after so many seconds.

    Args:
        seconds: From its first step on.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds

    def on_train_begin(self, args, state, control, **kwargs):
        self.end = time.perf_counter() + self.seconds

    def on_step_end(self, args, state, control, **kwargs):
        if time.perf_counter() > self.end:
            control.should_training_stop = True


def drafter_config(arguments: AdaptationArguments, target: PreTrainedConfig) -> DFlashDraftConfig:
    """That of the drafter which is there already, else of a new one."""
    if arguments.general_drafter:
        return DFlashDraftConfig.from_pretrained(arguments.general_drafter)
    return DFlashDraftConfig.from_target_config(
        target,
        num_hidden_layers=arguments.num_layers,
        num_taps=arguments.num_taps,
        block_size=arguments.block_size,
        mask_token_id=arguments.mask_token_id,
    )


def prompts(arguments: AdaptationArguments, split: str) -> list[str]:
    return code_prompts(split)[: arguments.num_prompts]


@torch.no_grad()
def answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], arguments: AdaptationArguments
) -> list[dict]:
    """The target's greedy answers as rows of completions, with the token ids it wrote."""
    tokenizer.padding_side = "left"
    ends = set(eos_token_ids(model.generation_config))
    rows = []
    for start in tqdm(range(0, len(texts), 256), desc="answering"):
        chats = [[{"role": "user", "content": text}] for text in texts[start : start + 256]]
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


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def timed(trainer: DFlashTrainer, before: int) -> dict[str, Any]:
    """Train, with seconds and the GPU memory that training adds to what was allocated before the drafter was there.

    `kept_gb` is what stays between steps (the drafter and its optimizer), `peak_gb` the most that there was at once.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    trainer.train()
    seconds, steps = time.perf_counter() - start, trainer.state.global_step
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    memory = {
        "peak_gb": (peak - before) / 1e9,
        "kept_gb": (allocated() - before) / 1e9,
        "held_before_gb": before / 1e9,
    }
    return {"seconds": seconds, "steps": steps, "seconds_per_step": seconds / steps} | memory


if __name__ == "__main__":
    main()
