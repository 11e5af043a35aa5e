# SPDX-License-Identifier: Apache-2.0
"""README's way from a request log to a new drafter, each command run; a drafter adapted to a quantised target."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from test_trainer import BLOCK_SIZE, NEW_TOKENS, SEEDS, written_documents
from tiny import MASK_TOKEN_ID, VOCAB_SIZE, byte_tokenizer, dense_target
from transformers import AutoModelForCausalLM, QuantoConfig

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments, validate_checkpoint
from dflash_hf.acceptance import measure_acceptance
from dflash_hf.adapters import load_adapter, lora_config
from dflash_hf.adapting import plain_drafter
from dflash_hf.command_tokenize import main as tokenize_command
from dflash_hf.model_card import write_facts
from dflash_hf.validation import main as dflash_hf_command


ROOT = Path(__file__).parents[1]
WORDS = ("red", "green", "blue", "white", "black", "brown", "pink", "grey")


def readme_commands() -> list[list[str]]:
    section = re.search(
        r"## Adapt a drafter to your traffic\n(.*?)\n## ", (ROOT / "recipes/README.md").read_text(), re.DOTALL
    )[1]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1]
    return [shlex.split(line) for line in block.splitlines()]


# What a tiny run on a CPU needs beside the words of README.
EXTRA = {
    "adapt_drafter.py": "--row_length 256 --num_anchors 8 --max_steps 3 --use_cpu true",
    "evaluate_acceptance.py": "--max_new_tokens 8 --device cpu --dtype float32",
}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a tiny target and drafter under the names of README, a log and held-out prompts."""
    monkeypatch.chdir(tmp_path)
    target = dense_target()
    target.save_pretrained("Qwen/Qwen3-8B")
    byte_tokenizer().save_pretrained("Qwen/Qwen3-8B")
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=2, num_taps=2, mask_token_id=MASK_TOKEN_ID, block_size=4
    )
    torch.manual_seed(0)
    DFlashDraftModel(config).save_pretrained("z-lab/Qwen3-8B-DFlash-b16", dtype=torch.bfloat16)
    rows = []
    for index, word in enumerate(WORDS * 4):
        request = {"model": "Qwen/Qwen3-8B", "messages": [{"role": "user", "content": f"{index} {word}?"}]}
        message = {"role": "assistant", "content": f"{word} is a colour that I like, as number {index}."}
        rows.append({"request": request, "response": {"choices": [{"message": message, "finish_reason": "stop"}]}})
    Path("requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("held_out.jsonl").write_text("".join(json.dumps({"prompt": f"{word}!"}) + "\n" for word in WORDS[:3]))
    return tmp_path


def test_readme_from_a_request_log_to_a_new_drafter(workplace, monkeypatch, capsys):
    scripts = []
    for words in readme_commands():
        if words[:2] == ["dflash-hf", "tokenize"]:
            assert tokenize_command([*words[2:], "--num_proc", "1"]) == 0
            continue
        if words[0] == "dflash-hf":
            assert dflash_hf_command(words[1:]) == 0
            continue
        script = Path(words[1]).name
        scripts.append(script)
        monkeypatch.setattr(sys, "argv", [str(ROOT / words[1]), *words[2:], *EXTRA.get(script, "").split()])
        try:
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
        except SystemExit as end:
            assert not end.code, (script, end.code)
    assert scripts == ["adapt_drafter.py", "evaluate_acceptance.py", "publish.py"]
    measured = json.loads(Path("adapted/adaptation.json").read_text())
    assert measured["before"]["eval_loss"] != measured["after"]["eval_loss"]
    assert Path("adapted/adapter_model.safetensors").exists() and validate_checkpoint("adapted/merged").ok
    assert load_adapter("adapted").peft_config["default"].base_model_name_or_path == "z-lab/Qwen3-8B-DFlash-b16"
    shown = capsys.readouterr().out
    assert "OWNER/Qwen3-8B-DFlash-support" in shown and "Nothing was sent" in shown
    assert '"num_speculative_tokens": 3' in shown and "| held_out | 3 |" in shown


@pytest.mark.parametrize(
    ("recipe", "objective", "warned"),
    [
        ({"objective": "dpace"}, "cross_entropy", True),
        ({"objective": "dpace"}, "dpace", False),
        ({}, "dpace", True),
        (None, "dpace", False),
    ],
)
def test_another_objective_than_the_drafters_own_is_said(tmp_path, capsys, recipe, objective, warned):
    if recipe is not None:
        write_facts({"format": 1, "recipe": recipe}, tmp_path)
    module = runpy.run_path(str(ROOT / "recipes" / "adapt_drafter.py"))
    module["warn_of_another_objective"](str(tmp_path), objective)
    own = (recipe or {}).get("objective", "cross_entropy")
    assert (f"`--objective {own}` goes on as it was trained" in capsys.readouterr().out) is warned


# A quantised target


def answers_of(target, documents):
    """The same prompts, answered by another target."""
    answered = []
    for document in documents:
        length = document["supervised_spans"][0][0]
        prompt = torch.tensor([document["input_ids"][:length]])
        ids = target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        answered.append({"input_ids": ids, "supervised_spans": [[length, len(ids)]]})
    return answered


def trained(drafter, target, documents, folder, epochs, **kwargs):
    arguments = DFlashTrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, learning_rate=3e-3, row_length=128, max_anchors_per_row=128,
        logging_steps=50, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = DFlashTrainer(drafter, target, arguments, train_dataset=documents, **kwargs)
    trainer.train()
    trainer.save_model()
    return trainer


def test_a_drafter_adapted_to_a_quantised_target_is_better_on_it(tmp_path):
    """quanto's int8 weights, on a CPU; the answers are learned by heart, so the gain shows on the prompts seen."""
    target = dense_target(seed=53)
    target.save_pretrained(tmp_path / "target")
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", quantization_config=QuantoConfig(weights="int8")
    ).eval()
    documents = written_documents(target, SEEDS["dense"])
    quantised_documents = answers_of(quantised, documents)
    assert documents != quantised_documents, "quantising changes what the target writes"
    used = {token for document in documents + quantised_documents for token in document["input_ids"]}
    mask = max(set(range(VOCAB_SIZE)) - used - {target.config.eos_token_id, target.config.pad_token_id})
    torch.manual_seed(0)
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=2, block_size=BLOCK_SIZE, mask_token_id=mask
    )
    trained(DFlashDraftModel(config), target, documents, tmp_path / "base", 100)
    base = DFlashDraftModel.from_pretrained(tmp_path / "base")
    prompts = [d["input_ids"][: d["supervised_spans"][0][0]] for d in documents]

    def acceptance(drafter):
        report = measure_acceptance(quantised, drafter.eval(), prompts, NEW_TOKENS, eos_token_id=[], progress=False)
        assert report.lossless
        return report.acceptance_length

    before = acceptance(base)
    trainer = trained(base, quantised, quantised_documents, tmp_path / "adapted", 60, peft_config=lora_config(8))
    after = acceptance(plain_drafter(trainer.model))
    print(f"on the int8 target: {before:.2f} unadapted, {after:.2f} adapted")
    assert after > before + 0.5
