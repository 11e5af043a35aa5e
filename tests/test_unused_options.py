# SPDX-License-Identifier: Apache-2.0
"""Options of recipes that would do nothing beside the others that are given are refused before anything is loaded."""

import importlib.util
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import CHATML_TEMPLATE, byte_tokenizer, dense_target

from dflash_hf import TokenizeOptions, load_documents, tokenize_files
from dflash_hf.cli import refuse_unused
from dflash_hf.training_args import check_scripted


RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def load(name):
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


adapt, train = map(load, ("adapt_drafter", "train_qwen36"))


@dataclass
class Options:
    num_shards: int = 1
    seed: int = 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"completions": "c", "synthetic_length": 64}, "synthetic_length=64 has no effect without"),
        ({"num_synthetic_documents": 4, "eval_completions": "c"}, "eval_completions=c has no effect beside synthetic"),
        ({"completions": "c", "preflight_upload_to": "x"}, "preflight_upload_to=x has no effect without preflight"),
        ({"completions": "c", "preflight": True, "dry_run": True}, "give one of them"),
    ],
)
def test_training(given, message):
    with pytest.raises(ValueError, match=message):
        train.check_sources(train.RecipeArguments(target=str(RECIPES), **given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"do_predict": True}, "do_predict=True: this recipe predicts nothing"),
        ({"do_eval": True}, "do_eval=True needs data to evaluate on"),
        ({"eval_strategy": "steps", "do_eval": True}, "eval_strategy=steps needs data"),
        ({"eval_on_start": True}, "eval_on_start=True needs data"),
    ],
)
def test_what_transformers_leaves_to_scripts(given, message):
    values = {"do_predict": False, "do_eval": False, "eval_on_start": False, "eval_strategy": "no", **given}
    args = SimpleNamespace(**{**values, "eval_strategy": SimpleNamespace(value=values["eval_strategy"])})
    with pytest.raises(ValueError, match=message):
        check_scripted(args, has_evaluation_data=False)
    if not args.do_predict:
        check_scripted(args, has_evaluation_data=True)


def test_an_adapters_options_without_an_adapter(monkeypatch, tmp_path):
    words = ["--drafter", "d", "--target", "t", "--documents", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    for more in (["--lora_rank", "0"], ["--trainable_modules", "fc"]):
        monkeypatch.setattr(sys, "argv", ["adapt_drafter.py", *words, *more, "--lora_alpha", "4", "--use_cpu", "true"])
        with pytest.raises(SystemExit, match="lora_alpha=4 has no effect without an adapter"):
            adapt.main()


def test_adapting_reads_chats_in_the_mode_and_with_the_leave_that_were_given(tmp_path):
    """Both reached the training recipe alone."""
    written = "{% if enable_thinking %}T{% endif %}"
    template = CHATML_TEMPLATE.replace("assistant\n{%", "assistant\n" + written + "{%")
    answer = "{% if message['role'] == 'assistant' %}" + written + "{% endif %}{{ message['content'] }}"
    template = template.replace("{{ message['content'] }}", answer)
    tokenizer, chats = byte_tokenizer(template), tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    chats.write_text(json.dumps({"messages": messages}) + "\n")
    dense_target().save_pretrained(tmp_path / "target")
    arguments = adapt.AdaptArguments("d", str(tmp_path / "target"), str(chats))
    settings = {"allow_other_template": False, "max_length": None, "row_length": 64}
    lengths = {}
    for thinking in (False, True):
        args = SimpleNamespace(enable_thinking=thinking, **settings)
        documents, _ = adapt.read_documents(arguments, args, tokenizer)
        lengths[thinking] = len(documents[0]["input_ids"])
    assert lengths[True] == lengths[False] + 1

    tokenize_files(chats, tmp_path / "documents", byte_tokenizer(), TokenizeOptions(), num_proc=1)
    arguments = adapt.AdaptArguments("d", str(tmp_path / "target"), str(tmp_path / "documents"))
    args = SimpleNamespace(enable_thinking=None, **{**settings, "allow_other_template": True})
    assert len(adapt.read_documents(arguments, args, tokenizer)[0]) == 1


def test_dt3_a_mode_that_documents_were_not_tokenised_in_is_refused(tmp_path):
    chats, tokenizer = tmp_path / "chats.jsonl", byte_tokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    chats.write_text(json.dumps({"messages": messages}) + "\n")
    tokenize_files(chats, tmp_path / "any", tokenizer, TokenizeOptions(), num_proc=1)
    tokenize_files(chats, tmp_path / "off", tokenizer, TokenizeOptions(enable_thinking=False), num_proc=1)
    with pytest.raises(ValueError, match=r"enable_thinking=True has no effect on .*enable_thinking=False.*anew"):
        load_documents(tmp_path / "off", tokenizer, enable_thinking=True)
    with pytest.raises(ValueError, match=r"enable_thinking=False has no effect on .*enable_thinking=None"):
        load_documents(tmp_path / "any", tokenizer, enable_thinking=False)
    assert len(load_documents(tmp_path / "off", tokenizer, enable_thinking=False, max_length=8)) == 1


def test_refusing_names_what_was_given_alone():
    with pytest.raises(ValueError, match=r"^num_shards=3 has no effect here\. Leave it out\.$"):
        refuse_unused(replace(Options(), num_shards=3), ["num_shards", "seed"], "here")
