# SPDX-License-Identifier: Apache-2.0
"""Options of recipes that would do nothing beside the others that are given are refused before anything is loaded."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import CHATML_TEMPLATE, MASK_TOKEN_ID, byte_tokenizer, dense_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, TokenizeOptions, tokenize_files
from dflash_hf.cli import refuse_unused
from dflash_hf.generation import speculative_decoding, speculative_generate


RECIPES = Path(__file__).resolve().parents[1] / "recipes"
HERE = {"target": "t", "drafters": ["d"], "prompts": "p"}
SERVED = {"server": ["http://localhost:1"], "prompts": "p"}
ASKED = {"target": "t", "prompts": "p", "output": "o"}


def load(name):
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


evaluate, generate, adapt, train = map(
    load, ("evaluate_acceptance", "generate_completions", "adapt_drafter", "train_qwen36")
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (SERVED | {"dtype": "float32"}, "dtype=float32 has no effect on a server"),
        (SERVED | {"temperature": 0.5, "sample_drafts": True}, "sample_drafts=True has no effect on a server"),
        (SERVED | {"use_cache": False}, "use_cache=False has no effect on a server"),
        (SERVED | {"target": "t"}, "target=t has no effect on a server"),
        (HERE | {"concurrency": 4}, "concurrency=4 has no effect on decoding here"),
        (HERE | {"plain_server": "http://localhost:1"}, "plain_server=.* has no effect on decoding here"),
        (HERE | {"top_p": 0.9}, "top_p=0.9 has no effect at temperature 0"),
        (HERE | {"sample_drafts": True, "top_k": 5}, "top_k=5, sample_drafts=True has no effect at temperature 0"),
    ],
)
def test_evaluating(given, message):
    with pytest.raises(ValueError, match=message):
        evaluate.EvaluationArguments(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"server": "http://localhost:1", "dtype": "float32"}, "dtype=float32 has no effect on a server"),
        ({"server": "http://localhost:1", "batch_size": 4}, "batch_size=4 has no effect on a server"),
        ({"concurrency": 4}, "concurrency=4 has no effect on answers generated here"),
        ({"return_token_ids": False}, "return_token_ids=False has no effect on answers generated here"),
        ({"top_p": 0.9}, "top_p=0.9 has no effect at temperature 0"),
    ],
)
def test_generating(given, message):
    with pytest.raises(ValueError, match=message):
        generate.CompletionArguments(**ASKED, **given)


def test_what_acts_is_taken():
    evaluate.EvaluationArguments(**HERE, temperature=0.7, top_p=0.9, top_k=5, sample_drafts=True, dtype="float32")
    evaluate.EvaluationArguments(**SERVED, temperature=0.7, top_p=0.9, top_k=5, concurrency=4, model="m")
    generate.CompletionArguments(**ASKED, temperature=0.7, top_p=0.9, batch_size=4)
    generate.CompletionArguments(**ASKED, server="http://localhost:1", concurrency=4, retries=1)


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


def test_refusing_names_what_was_given_alone():
    with pytest.raises(ValueError, match=r"^timeout=3 has no effect here\. Leave it out\.$"):
        refuse_unused(
            generate.CompletionArguments(**ASKED, server="http://h:1", timeout=3), ["timeout", "seed"], "here"
        )


def test_a_drafter_by_name_and_beams_are_refused_as_such():
    target = dense_target()
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=1, num_taps=1, mask_token_id=MASK_TOKEN_ID, block_size=4
    )
    ids, drafter = torch.tensor([[1, 2, 3]]), DFlashDraftModel(config)
    with pytest.raises(ValueError, match=r"drafter is a str.*from_pretrained"):
        speculative_generate(target, "folder", ids, 4)
    with pytest.raises(ValueError, match="num_beams=2"):
        target.generate(ids, custom_generate=speculative_decoding, drafter=drafter, max_new_tokens=4, num_beams=2)
