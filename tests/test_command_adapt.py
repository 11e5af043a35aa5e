# SPDX-License-Identifier: Apache-2.0
"""`dflash-hf adapt`: from a request log to a new drafter, what it trains, and a drafter for a quantised target."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import make_trainer
from tiny import CHATML_TEMPLATE, VOCAB_SIZE, byte_tokenizer, dense_target, refused, tiny_drafter
from transformers import AutoModelForCausalLM, QuantoConfig

from dflash_hf import DFlashDraftModel, DFlashTrainer, TokenizeOptions, tokenize_files, validate_checkpoint
from dflash_hf.acceptance import measure_acceptance
from dflash_hf.adapters import load_adapter, lora_config
from dflash_hf.adapting import plain_drafter
from dflash_hf.command_adapt import AdaptArguments, main, read_documents
from dflash_hf.model_card import read_facts, write_facts
from dflash_hf.publishing import main as publish


ROOT = Path(__file__).parents[1]
DRAFTER, TARGET = "z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B"
WORDS = ("red", "green", "blue", "white", "black", "brown", "pink", "grey")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a tiny target and drafter under the names of README, and documents of a log with their split."""
    monkeypatch.chdir(tmp_path)
    target, tokenizer = dense_target(), byte_tokenizer()
    target.save_pretrained(TARGET)
    tokenizer.save_pretrained(TARGET)
    tiny_drafter(target).save_pretrained(DRAFTER, dtype=torch.bfloat16)
    rows = []
    for index, word in enumerate(WORDS * 4):
        request = {"model": TARGET, "messages": [{"role": "user", "content": f"{index} {word}?"}]}
        message = {"role": "assistant", "content": f"{word} is a colour that I like, as number {index}."}
        rows.append({"request": request, "response": {"choices": [{"message": message, "finish_reason": "stop"}]}})
    Path("requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize_files("requests.jsonl", "documents", tokenizer, TokenizeOptions(eval_fraction=0.1), num_proc=1)
    return tmp_path


def adapt(*words: str, documents: str = "documents") -> None:
    given = ["--drafter", DRAFTER, "--target", TARGET, "--documents", documents, "--output_dir", "adapted"]
    given += ["--row_length", "256", "--num_anchors", "8", "--max_steps", "2", "--use_cpu", "true"]
    main([*given, *words])


def test_from_a_request_log_to_a_new_drafter(workplace, capsys):
    adapt("--lora_alpha", "8")
    measured = json.loads(Path("adapted/adaptation.json").read_text())
    assert measured["before"]["eval_loss"] != measured["after"]["eval_loss"]
    assert Path("adapted/adapter_model.safetensors").exists() and validate_checkpoint("adapted/merged").ok
    config = load_adapter("adapted").peft_config["default"]
    assert (config.base_model_name_or_path, config.r, config.lora_alpha) == (DRAFTER, 16, 8)
    publish(["--drafter", "adapted/merged", "--repo_id", "OWNER/Qwen3-8B-DFlash-support", "--dry_run", "true"])
    shown = capsys.readouterr().out
    assert "| acceptance length |" in shown and "LoRA of rank 16" in shown and "2 steps" in shown


@pytest.mark.parametrize(
    ("words", "moves"),
    [
        (["--lora_rank", "0"], lambda name: True),
        (["--trainable_modules", "fc", "hidden_norm"], lambda name: name.startswith(("fc.", "hidden_norm."))),
        (["--lora_rank", "2", "--lora_modules", "q_proj"], lambda name: "q_proj" in name),
        (["--config", str(ROOT / "recipes" / "adapt.yaml")], lambda name: "norm" not in name),
    ],
)
def test_the_part_that_is_asked_for_is_trained(workplace, words, moves):
    # Steps that bf16 shows.
    adapt(*words, "--learning_rate", "0.1", documents="requests.jsonl")
    before, after = (DFlashDraftModel.from_pretrained(folder).state_dict() for folder in (DRAFTER, "adapted/merged"))
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(filter(moves, before))
    assert not Path("adapted/adaptation.json").exists()


@pytest.mark.parametrize("words", [[], ["--objective", "cross_entropy"]])
def test_n4_it_goes_on_by_the_drafters_own_objective(workplace, words, caplog):
    write_facts({"format": 1, "recipe": {"objective": "dpace"}}, Path(DRAFTER))
    adapt(*words)
    assert read_facts("adapted/merged")["recipe"].get("objective") == (None if words else "dpace")
    assert DRAFTER in caplog.text and "dpace" in caplog.text


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--lora_modules", "qkv"], ["qkv", "lora_modules"]),
        (["--lora_rank", "-1"], ["lora_rank", "-1"]),
        (["--trainable_modules", "layers.9"], ["layers.9"]),
        (["--lora_rank", "0", "--lora_alpha", "4"], ["lora_alpha"]),
        (["--trainable_modules", "fc", "--lora_alpha", "4"], ["lora_alpha"]),
        (["--drafter", "adapted"], ["adapted"]),
    ],
)
def test_what_cannot_be_is_said_in_one_line_before_documents_are_read(workplace, words, names):
    with refused(SystemExit, *names):
        adapt(*words, documents="nowhere.jsonl")


def test_peft_is_missed_by_name_and_another_adapter_is_not_resumed(workplace, monkeypatch):
    words = ["--save_strategy", "steps", "--save_steps", "1"]
    adapt(*words, "--lora_rank", "4")
    # It shows before the measurement.
    monkeypatch.setattr(DFlashTrainer, "evaluate", None)
    with refused(SystemExit, "r 4 there and 2 here"):
        adapt(*words, "--lora_rank", "2", "--resume_from_checkpoint", "true")
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.delitem(sys.modules, "dflash_hf.adapters")
    with refused(SystemExit, "peft", "pip install"):
        adapt()


def test_chats_are_read_in_the_mode_and_with_the_leave_that_were_given(workplace):
    """Both reached the training recipe alone."""
    written = "{% if enable_thinking %}T{% endif %}"
    template = CHATML_TEMPLATE.replace("assistant\n{%", "assistant\n" + written + "{%")
    answer = "{% if message['role'] == 'assistant' %}" + written + "{% endif %}{{ message['content'] }}"
    tokenizer = byte_tokenizer(template.replace("{{ message['content'] }}", answer))
    settings = {"allow_other_template": False, "max_length": None, "row_length": 128}
    lengths = []
    for thinking in (False, True):
        args = SimpleNamespace(enable_thinking=thinking, **settings)
        documents, _ = read_documents(AdaptArguments("d", TARGET, "requests.jsonl"), args, tokenizer)
        lengths.append(len(documents[0]["input_ids"]))
    assert lengths[1] == lengths[0] + 1
    args = SimpleNamespace(enable_thinking=None, **{**settings, "allow_other_template": True})
    assert len(read_documents(AdaptArguments("d", TARGET, "documents"), args, tokenizer)[0])


# --- A quantised target.


def written_by(target, prompts) -> list[dict]:
    """Documents of prompts that a target answers greedily."""
    answers = [target.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0].tolist() for ids in prompts]
    return [
        {"input_ids": ids, "supervised_spans": [[len(prompt), len(ids)]]}
        for prompt, ids in zip(prompts, answers, strict=True)
    ]


def test_a_drafter_adapted_to_a_quantised_target_is_better_on_it(tmp_path):
    """quanto's int8 weights, on a CPU; the answers are learned by heart, so the gain shows on the prompts seen."""
    target = dense_target(seed=53)
    target.save_pretrained(tmp_path / "target")
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", quantization_config=QuantoConfig(weights="int8")
    ).eval()
    prompts = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0)).tolist()
    documents, quantised_documents = written_by(target, prompts), written_by(quantised, prompts)
    assert documents != quantised_documents, "quantising changes what the target writes"
    used = {token for document in documents + quantised_documents for token in document["input_ids"]}
    mask = max(set(range(VOCAB_SIZE)) - used - {target.config.eos_token_id, target.config.pad_token_id})
    settings = {
        "max_steps": -1, "learning_rate": 3e-3, "row_length": 128, "max_anchors_per_row": 128, "num_anchors": 512,
        "save_strategy": "no", "warmup_steps": 0.04,
    }  # fmt: skip

    def trained(drafter, target, documents, folder, epochs, **kwargs):
        trainer = make_trainer(folder, target, documents, drafter, num_train_epochs=epochs, **settings, **kwargs)
        trainer.train()
        trainer.save_model()
        return trainer

    def acceptance(drafter):
        report = measure_acceptance(quantised, drafter.eval(), prompts, 24, eos_token_id=[], progress=False)
        assert report.lossless
        return report.acceptance_length

    new = tiny_drafter(target, num_taps=3, block_size=8, mask_token_id=mask)
    trained(new, target, documents, tmp_path / "base", 100)
    base = DFlashDraftModel.from_pretrained(tmp_path / "base")
    before = acceptance(base)
    trainer = trained(base, quantised, quantised_documents, tmp_path / "adapted", 60, peft_config=lora_config(8))
    after = acceptance(plain_drafter(trainer.model))
    print(f"on the int8 target: {before:.2f} unadapted, {after:.2f} adapted")
    assert after > before + 0.5
