# SPDX-License-Identifier: Apache-2.0
"""Cards: metadata that the Hub takes, commands that match the configuration, nothing that is not known."""

import inspect
import json
import re
import runpy
import shlex
from math import nan
from pathlib import Path

import pytest
import torch
from datasets import concatenate_datasets
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results
from runs import make_trainer
from tiny import byte_tokenizer, dense_target, llama_target, refused, tiny_drafter

from dflash_hf import (
    DFlashDraftModel,
    DFlashTrainingArguments,
    TokenizeOptions,
    tokenize_files,
)
from dflash_hf.documents import open_documents
from dflash_hf.model_card import (
    FEW_PROMPTS,
    RECIPE_ARGUMENTS,
    CardOptions,
    differing_arguments,
    hub_id,
    load_results,
    model_card,
    python_example,
    read_facts,
    read_results,
    recorded_results,
    write_facts,
)
from dflash_hf.validation import Checkpoint, read_folder, serving_commands


ROOT = Path(__file__).parents[1]
RECIPES = runpy.run_path(str(ROOT / "recipes" / "model_cards.py"))
CARDS = sorted((ROOT / "model_cards").glob("*.md"))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", text, re.DOTALL)


def assert_commands(text: str, repo_id: str, target: str, block_size: int) -> None:
    """The numbers and names of all serving commands."""
    shell = [[w for w in shlex.split(b, comments=True) if w != "\n"] for b in blocks(text, "bash")]
    (vllm,) = (command for command in shell if command[0] == "vllm")
    speculative = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert vllm[:3] == ["vllm", "serve", target]
    assert speculative == {"method": "dflash", "model": repo_id, "num_speculative_tokens": block_size - 1}
    (sglang,) = (command for command in shell if "sglang.launch_server" in command)
    assert dict(zip(sglang[3::2], sglang[4::2], strict=True)) == {
        "--model-path": target,
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": repo_id,
        "--speculative-num-draft-tokens": str(block_size),
    }
    assert "pip install dflash_hf" in text
    for program in blocks(text, "python"):
        compile(program, "card", "exec")
        assert json.dumps(target) in program and json.dumps(repo_id) in program


# --- The cards of the recipes.


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_our_cards_are_those_of_the_recipes_now_and_their_commands_match(path):
    """`python recipes/model_cards.py` writes them anew."""
    text = path.read_text()
    assert str(RECIPES["CARDS"][path.name]()) + "\n" == text and len(CARDS) == len(RECIPES["CARDS"])
    card = ModelCard(text)
    # What ModelCard could not read it would leave out: written again it is the same.
    assert ModelCardData(**card.data.to_dict()).to_dict() == card.data.to_dict()
    assert {"dflash", "speculative-decoding"} <= set(card.data.tags) and card.data.license == "apache-2.0"
    block_size = int(re.search(r"block size (\d+)", text)[1])
    assert_commands(text, f"OWNER/{path.stem}", card.data.base_model, block_size)
    for command in blocks(text, "bash"):
        for script in re.findall(r"recipes/[\w./-]+\.(?:py|yaml)", command):
            assert (ROOT / script).is_file(), script
    planned = path.stem == "Qwen3.6-27B-DFlash"
    assert ("not trained yet" in text) == planned == ("model-index" not in text)


def test_s2_the_figures_of_our_cards_are_those_of_their_readme_and_the_shipped_drafter_knows_its_training():
    own = RECIPES["study_facts"](RECIPES["study_row"]("muon-48-small", 4040))
    assert read_facts(ROOT / "recipes" / "smollm2-135m" / "drafter") == own
    readme = " ".join((ROOT / "recipes/smollm2-135m/README.md").read_text().split())
    for path in CARDS:
        for length, interval in re.findall(
            r"^\| [^|]+ \| \d+ \| ([\d.]+) \| ([^|]+?) \|", path.read_text(), re.MULTILINE
        ):
            assert re.search(rf"\b{length} (\| |\(){interval}", readme), (path.name, length, interval)


# --- Any card.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target with a chat template, and a drafter for it."""
    root = tmp_path_factory.mktemp("models")
    target = llama_target()
    target.generation_config.eos_token_id = 258
    target.save_pretrained(root / "target")
    byte_tokenizer().save_pretrained(root / "target")
    tiny_drafter(target).save_pretrained(root / "drafter", dtype=torch.bfloat16)
    return root


@pytest.fixture
def checkpoint(folders):
    return read_folder(folders / "drafter", "me/tiny-DFlash")


@pytest.mark.parametrize("reader", ["transformers", "z-lab"])
def test_the_programs_of_a_card_run(folders, reader, capsys):
    target, drafter = str(folders / "target"), str(folders / "drafter")
    config = json.loads((folders / "drafter" / "config.json").read_text())
    snippet = serving_commands(Checkpoint(drafter, config=config, base_model=target))[reader]
    exec(python_example(snippet, target).replace("max_new_tokens=256", "max_new_tokens=8"), {})
    assert capsys.readouterr().out.strip()


EVALUATION = {
    "definition": "...",
    "settings": {
        "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 64, "dtype": "auto", "target_dtype": "torch.bfloat16",
        "enable_thinking": False, "hardware": "NVIDIA H200", "versions": {"torch": "2.11", "transformers": "5.24"},
    },
    "drafters": {
        "first": {
            "acceptance_length": 3.2, "num_prompts": 12, "interval": [3.0, 3.4], "speed_up": 2.5,
            "speed_up_interval": [2.2, 2.8], "slot_acceptance": [0.9, 0.7, None], "prompts": [],
            "by_source": {
                "humaneval": {"acceptance_length": 3.5, "num_prompts": 6, "speed_up": None, "slot_acceptance": []},
                "gsm8k": {"acceptance_length": 2.9, "num_prompts": 6, "speed_up": 2.0, "slot_acceptance": []},
                "none": {"acceptance_length": None, "num_prompts": 1},
            },
        },
        "second": {},
    },
}  # fmt: skip
FACTS = {
    "target": {
        "id": "org/target", "revision": "abc123", "digest": "d" * 64, "model_type": "llama", "dtype": "bfloat16",
        "quantised": "quanto int8",
    },
    "continued_from": "org/base-DFlash",
    "adapter": {"default": {"r": 16, "type": "LORA"}},
    "recipe": {"enable_thinking": True, "learning_rate": 1e-3, "max_steps": 1200, "num_train_epochs": 3},
    "steps": 1200, "epochs": 3.0, "hours": 4.25, "hours_since_step": 0, "hardware": "2 x NVIDIA H200",
    "versions": {"torch": "2.11", "transformers": "5.24"},
    "data": {
        "documents": 1000, "tokens": 200000, "supervised_tokens": 150000, "tokens_seen": 600000,
        "longest_document": 4096, "digest": "e" * 64, "manifest": {"template_hash": "f" * 64},
    },
}  # fmt: skip


def test_n12_a_card_tells_all_that_is_known(checkpoint):
    results = read_results(EVALUATION, "first")
    card = model_card(
        checkpoint, FACTS, results, CardOptions(license="mit", languages=["en", "de"], plots=["a b.png"])
    )
    text = str(card)
    assert_commands(text, "me/tiny-DFlash", "org/target", 4)
    for told in (
        "| humaneval | 6 | 3.50 | - | - |", "| all | 12 | 3.20 | 3.00 to 3.40 | 2.50 (2.20 to 2.80) |", "thinking off",
        "on NVIDIA H200", "![a b](a%20b.png)", "[org/base-DFlash]", "`abc123`", "quanto int8", "LoRA of rank 16",
        "200,000, 150,000 of them", "600,000 in 3 epochs, 1,200 steps", "4.2 hours", "2 x NVIDIA H200",
        "`ffffffffffff`", "enable_thinking: true", "thinking on;", "4,096 tokens", "max_steps: 1200",
    ):  # fmt: skip
        assert told in text, told
    # The steps override the epochs. Whose licences apply: of the first drafter's too.
    assert "num_train_epochs" not in text and text.count("org/base-DFlash") == 3
    data = card.data.to_dict()
    # An adapter would be filed under LoRAs.
    assert (
        data["language"] == ["en", "de"] and data["base_model"] == "org/target" and "base_model_relation" not in data
    )
    name, evaluations = model_index_to_eval_results(data["model-index"])
    assert name == "tiny-DFlash" and [e.metric_value for e in evaluations] == [3.5, 2.9, 3.2]
    assert [e.metric_args for e in evaluations][-1] == {"num_prompts": 12, "interval_95": [3.0, 3.4]}


@pytest.mark.parametrize(
    ("number", "speed_up", "is_shown", "is_slower"),
    [(FEW_PROMPTS, 2.0, True, False), (FEW_PROMPTS - 1, 2.0, False, False), (2, 0.12, False, False),
     (50, 0.12, True, True), (50, 1.0, True, False), (50, None, False, False)],
)  # fmt: skip
def test_n12_a_speed_up_of_few_prompts_is_left_out_and_one_below_1_is_told(
    checkpoint, number, speed_up, is_shown, is_slower
):
    report = {"acceptance_length": 2.0, "num_prompts": number, "speed_up": speed_up}
    results = read_results({"drafters": {"d": report}, "settings": EVALUATION["settings"]})
    text = str(model_card(checkpoint, FACTS, results))
    assert f"{speed_up:.2f}" in text if is_shown else "| speed-up |" not in text
    assert ("speed-up below 1" in text) is is_slower
    assert (f"fewer than {FEW_PROMPTS} prompts" in text) is (speed_up is not None and not is_shown)


def test_n12_a_card_invents_nothing(checkpoint, caplog):
    text = str(model_card(checkpoint))
    assert "**Not yet measured.**" in text and "No record of the run" in text and "not stated one" in text
    for word in ("base_model:", "model-index", "local folder", "adapted from", "None", "TARGET", "vllm serve"):
        assert word not in text, word
    assert "base_model" in caplog.text
    hybrid = {"target": {"id": "org/hybrid", "model_type": "qwen3_5_text"}, "recipe": {}}
    text = str(model_card(checkpoint, hybrid))
    assert "speculative_generate" in text and "vllm serve org/hybrid" in text and not blocks(text, "python")


@pytest.mark.parametrize(
    ("manifest", "recipe", "told"),
    [
        ({"thinking": False}, {}, "thinking off;"),
        ({"thinking": "inferred"}, {}, "on where an answer holds some, else off;"),
        ({"thinking": None}, {}, "the chat template's own default;"),
        ({"thinking": "mixed"}, {}, "of several modes;"),
        ({"template_hash": "f" * 64}, {}, "not recorded."),
        (None, {"enable_thinking": False}, "thinking off;"),
    ],
)
def test_dt3_a_card_tells_the_mode_that_the_documents_were_tokenised_in(checkpoint, manifest, recipe, told):
    facts = {**FACTS, "recipe": recipe, "data": {**FACTS["data"], "manifest": manifest}}
    assert f"Thinking in that data: {told}" in str(model_card(checkpoint, facts))


# --- What is read.


BAD_RESULTS = (
    *("", "[]", "3", "{}", '{"a": {"after": 3}}', "\xff", '{"drafters": {"a": 3}, "settings": {}}'),
    *(json.dumps({**EVALUATION, "drafters": {"a": {"num_prompts": 3, "acceptance_length": x}}}) for x in (None, nan)),
    # Of several drafters, and none is named.
    *(json.dumps({**EVALUATION, "finished": False}), json.dumps(EVALUATION)),
)


@pytest.mark.parametrize("content", BAD_RESULTS)
def test_results_and_records_that_a_card_cannot_tell_are_named_and_end_no_push(tmp_path, content, caplog):
    for name in ("results.json", "training.json"):
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with refused(ValueError, "results.json"):
        load_results(tmp_path / "results.json")
    assert recorded_results(tmp_path) is read_facts(tmp_path) is None and "training.json" in caplog.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [("org/name", "org/name"), ("gpt2", "gpt2"), ("/abs/path", None), ("./rel", None), ("a/b/c", None), ("", None),
     (None, None), ("~/x", None), ("C:\\models\\x", None), (".cache/target", None), ("tests", None)],
)  # fmt: skip
def test_a_local_path_is_no_hub_id(name, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert hub_id(name) == expected


# --- The facts of a run.


def facts_of(tmp_path, documents) -> dict:
    trainer = make_trainer(
        tmp_path / "run", dense_target(), documents, max_steps=1, save_strategy="no", row_length=512
    )
    trainer.train()
    return read_facts(tmp_path / "run")


def test_dt3_a_run_tells_its_data_and_the_mode_that_it_was_tokenised_in(tmp_path):
    """Supervised tokens are counted alike in lists and in Arrow."""
    tokenizer, chats, parts = byte_tokenizer(), tmp_path / "chats.jsonl", []
    chats.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcdefgh"}]}\n')
    for number, mode in enumerate(({"enable_thinking": False}, {"infer_thinking": True})):
        tokenize_files(chats, tmp_path / str(number), tokenizer, TokenizeOptions(**mode), num_proc=1)
        parts.append(open_documents(tmp_path / str(number)))
    both = concatenate_datasets(parts)
    for data, thinking in ((parts[0], False), (parts[1], "inferred"), (both, "mixed"), (both.to_list(), None)):
        told = facts_of(tmp_path / f"of-{thinking}", data)["data"]
        assert (told["manifest"] or {}).get("thinking") == thinking
        assert told["supervised_tokens"] == sum(b - a for row in data for a, b in row["supervised_spans"]) > 0
        assert told["tokens"] == sum(len(row["input_ids"]) for row in data)


@pytest.mark.parametrize("name", ["org/base-DFlash", None])
def test_what_a_drafter_was_adapted_from_is_told_through_local_folders(folders, tmp_path, name, checkpoint):
    """Adapted twice: the second time from a folder, whose record names what the first was adapted from."""
    first = tmp_path / "first"
    DFlashDraftModel.from_pretrained(folders / "drafter").save_pretrained(first)
    write_facts({"format": 1, "recipe": {}, "continued_from": name}, first)
    trainer = make_trainer(
        tmp_path / "run", llama_target(), drafter=DFlashDraftModel.from_pretrained(first), max_steps=1,
        save_strategy="no", trainable_modules=["fc"],
    )  # fmt: skip
    trainer.train()
    facts = read_facts(tmp_path / "run")
    assert facts["continued_from"] == name and facts["is_continued"] is True
    told = f"adapted from [{name}](https://huggingface.co/{name})" if name else "adapted from a drafter that"
    assert told in str(model_card(checkpoint, facts))


# Arguments of ours that decide how fast, where and how visibly a run goes, and not what its drafter becomes.
OF_THE_RUN = {
    *("allow_other_template", "loss_chunk_blocks", "target_device", "target_layout", "prefetch_depth"),
    *("feature_copies", "measure_alone_steps", "compile_target", "allow_slow_target", "drafter_attn_implementation"),
    *("max_nonfinite_steps", "remote_checkpoint_dir", "allow_resume_changes", "compile_layers"),
    *("per_device_eval_batch_size", "logging_steps", "remove_unused_columns", "logging_nan_inf_filter", "use_cache"),
}


def test_a_card_tells_of_every_argument_that_decides_what_a_drafter_becomes():
    own = set(inspect.get_annotations(DFlashTrainingArguments))
    assert own - set(RECIPE_ARGUMENTS) == OF_THE_RUN & own
    given = {"muon": True, "loss_temperature": 0.5, "learning_rate": 6e-4, "objective": "cross_entropy", "seed": 7}
    told = differing_arguments({**given, "output_dir": "/x", "hub_token": "t"})
    assert told == {"muon": True, "loss_temperature": 0.5, "seed": 7}
