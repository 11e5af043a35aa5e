# SPDX-License-Identifier: Apache-2.0
"""The recipes run as written, on a tiny target, by plain python and by `accelerate launch`; so does the README."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from dflash_hf import DFlashDraftModel


ROOT = Path(__file__).resolve().parents[1]
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHAPE = ["--num_layers", "2", "--num_attention_heads", "2", "--num_key_value_heads", "1", "--head_dim", "32"]
SHAPE += ["--intermediate_size", "64", "--layer_types", "sliding_attention", "full_attention"]
SHAPE += ["--sliding_window", "16", "--block_size", "4", "--target_layer_ids", "1", "4", "--mask_token_id", "260"]
SMALL = ["--row_length", "128", "--max_length", "96", "--num_anchors", "8", "--max_steps", "3", "--bf16", "false"]
SMALL += ["--target_model_init_kwargs", '{"dtype": "float32"}', "--logging_steps", "1", "--use_cpu", "true"]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny.llama_target(num_layers=9).save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def completions(tmp_path_factory) -> Path:
    return tiny.write_chats(tmp_path_factory.mktemp("data") / "completions.jsonl")


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("launcher", [[sys.executable], [sys.executable, "-m", "accelerate.commands.launch"]])
def test_the_training_recipe_runs_and_continues(launcher, target_folder, completions, tmp_path):
    if len(launcher) > 1:
        launcher = [*launcher, "--num_processes", "1", "--cpu"]
        documents = tmp_path / "documents"
        tokenize = [
            sys.executable,
            "-c",
            "from dflash_hf.command_tokenize import main; main()",
            "--completions",
            completions,
        ]
        tokenize += ["--target", target_folder, "--output", documents, "--max_length", "96", "--num_proc", "1"]
        run(*tokenize, "--eval_fraction", "0.4")
        completions = documents
    script = [*launcher, "recipes/train_qwen36.py", "--target", target_folder, "--completions", completions]
    first, second = tmp_path / "first", tmp_path / "second"
    run(*script, *SHAPE, *SMALL, "--output_dir", first, "--eval_completions", completions)
    drafter = DFlashDraftModel.from_pretrained(first)
    assert drafter.config.layer_types == ["sliding_attention", "full_attention"]
    assert json.loads((first / "eval_results.json").read_text())["eval_acceptance_length"] >= 1
    run(*script, *SMALL, "--config", "recipes/qwen3.6-27b/continue.yaml", "--drafter", first, "--output_dir", second)
    continued = DFlashDraftModel.from_pretrained(second)
    written = [json.loads((folder / "config.json").read_text()) for folder in (first, second)]
    assert written[0] == written[1]
    moved = [
        name
        for (name, a), b in zip(drafter.named_parameters(), continued.parameters(), strict=True)
        if not torch.equal(a, b)
    ]
    assert len(moved) == len(list(drafter.parameters()))


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


def test_the_readme_program_runs_on_a_tiny_target(target_folder, completions, tmp_path):
    program, *decoding = python_blocks(ROOT / "README.md")
    assert len([line for line in program.splitlines() if line.strip()]) < 15
    program = "".join([program, *decoding]).replace(MODEL_ID, str(target_folder))
    program = program.replace("recipes/smollm2-135m/completions.jsonl", str(completions))
    program = program.replace("mask_token_id=15", "mask_token_id=260").replace("row_length=1024", "max_steps=1")
    run(sys.executable, "-c", program, cwd=tmp_path)
    assert (tmp_path / "drafter" / "model.safetensors").exists()


def test_the_readme_commands_are_targets_of_the_makefile():
    commands = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= commands <= targets


@pytest.mark.slow
def test_two_ranks_train_the_drafter_of_one_that_accumulates(tmp_path, target_folder, completions):
    script = "recipes/smollm2-135m/check_ranks.py"
    words = ["--target", target_folder, "--completions", completions, "--num_layers", "1", "--block_size", "4"]
    words += ["--row_length", "96", "--max_steps", "4", "--use_cpu", "true", "--mask_token_id", "260"]
    config = "recipes/accelerate/two_pairs.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port=0"]
    run(*launch, script, *words, "--output_dir", tmp_path / "two")
    one = ["--gradient_accumulation_steps", "2", "--output_dir", tmp_path / "one", "--compare_with", tmp_path / "two"]
    run(sys.executable, script, *words, *one)
    two, one = (json.loads((tmp_path / name / "ranks.json").read_text()) for name in ("two", "one"))
    assert (two["world_size"], one["world_size"]) == (2, 1)
    assert two["largest_difference_between_ranks"] == 0.0 and len(one["losses"]) == 4
    assert one["relative_difference_of_weights"] < 1e-5 and one["largest_difference_of_losses"] < 1e-3
