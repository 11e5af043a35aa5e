# SPDX-License-Identifier: Apache-2.0
"""DFlash 2 from training to decoding: what is learned, measured and decoded is one and the same drafter."""

import copy
import json
import tempfile

import pytest
import torch
from oracle import PROMPT
from published import FULL, SLIDING
from runs import finish, make_documents, make_trainer, start, train
from test_convert_speculators import speculators_config, write_speculators
from test_generation import PROMPT_OF_FEW, assert_drawn_from, exact
from test_modeling_dflash2 import random_dflash2
from tiny import dense_target, hybrid_target, refused, tiny_drafter
from torch.optim import AdamW

from dflash_hf import (
    DataCollatorForDFlash,
    DFlash2DraftConfig,
    DFlash2DraftModel,
    DFlashDraftModel,
    FrozenTarget,
    PackedDataset,
    adapt,
    convert_speculators,
    validate_checkpoint,
)
from dflash_hf.acceptance import walk_batch, walk_documents
from dflash_hf.adapters import lora_config, merge_adapter
from dflash_hf.checkpoint_format import GEOMETRY
from dflash_hf.command_train import main
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.generation import check_drafter, speculative_generate_batch
from dflash_hf.publishing import main as publish


SMALL = {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 64}


def grown(target=None) -> DFlash2DraftModel:
    """A tiny drafter that was made one of DFlash 2."""
    return DFlash2DraftModel.from_dflash(tiny_drafter(dense_target() if target is None else target), **SMALL)


@pytest.mark.parametrize("muon", [False, True], ids=["adamw", "muon"])
def test_training_begins_where_dflash_stands_and_the_selector_learns(tmp_path, muon):
    settings = {"muon": muon, "max_steps": 12, "save_steps": 12, "context_noise": 0.0, "weight_decay": 0.1}
    settings |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    plain = make_trainer(tmp_path / "plain", drafter=tiny_drafter(dense_target()), **settings)
    trainer = make_trainer(tmp_path / "grown", drafter=grown(), eval_dataset=make_documents(4), **settings)
    start, before = trainer.evaluate(), plain.evaluate(make_documents(4))
    details = trainer.state.log_history[-1]["details"]
    assert start["eval_acceptance_length"] == before["eval_acceptance_length"]
    assert details["eval_acceptance_length_argmax"] <= details["eval_acceptance_length_oracle"]
    assert start["eval_loss"] == pytest.approx(before["eval_loss"] + details["eval_selector_loss"], rel=1e-5)
    trainer.train()
    first, *_, last = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert last["details"]["selector_loss"] < 0.8 * first["details"]["selector_loss"]
    selector = trainer.model.candidate_selector
    groups = {id(p): group for group in trainer.optimizer.param_groups for p in group["params"]}
    tables = (selector.predecessor_codebook, selector.successor_codebook, trainer.model.layers[0].mlp_conv.base_kernel)
    assert all(groups[id(table)]["weight_decay"] == 0 for table in tables)
    if muon:
        by_adamw = {
            id(p)
            for part in trainer.optimizer.optimizer.parts
            if isinstance(part, AdamW)
            for g in part.param_groups
            for p in g["params"]
        }
        assert {id(table) for table in tables} <= by_adamw and id(selector.hidden_projection.weight) not in by_adamw
    trainer.save_model()
    trainer.create_model_card()
    card = (tmp_path / "grown" / "README.md").read_text()
    assert "(https://arxiv.org/abs/2602.06036) 2 drafter" in card
    command = validate_checkpoint(tmp_path / "grown").serving_commands()["transformers"]
    assert "custom_generate=generation.speculative_decoding" in command and "DFlash2DraftModel, generation" in command
    saved = DFlashDraftModel.from_pretrained(tmp_path / "grown" / "checkpoint-12")
    assert torch.equal(saved.candidate_selector.successor_codebook, selector.successor_codebook)


def gradients(tmp_path, **overrides):
    trainer = make_trainer(tmp_path, drafter=grown(), max_steps=1, save_strategy="no", max_grad_norm=0, **overrides)
    kept = {}

    def keep(model, grad_norm=None):
        kept.update({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        return torch.zeros(())

    trainer._get_grad_norm = keep
    trainer.train()
    return kept


def test_split_differently_the_step_has_the_same_gradients(tmp_path):
    at_once = gradients(tmp_path / "a", per_device_train_batch_size=4)
    in_parts = gradients(tmp_path / "b", gradient_accumulation_steps=4)
    assert at_once["candidate_selector.successor_codebook"].abs().max() > 0
    for name, gradient in at_once.items():
        torch.testing.assert_close(in_parts[name], gradient, rtol=1e-4, atol=1e-6)


def test_two_ranks_and_a_resumed_run_train_the_same_drafter(tmp_path):
    """Gradients of the selector cross ranks too, though no forward of the drafter reads it."""
    settings = {"max_steps": 4, "save_steps": 2, "drafter": grown(), "adam_epsilon": 1e-3, "max_anchors_per_row": 8}
    (tmp_path / "two").mkdir()
    log = tmp_path / "log"
    assert finish(start(train, str(tmp_path / "two"), world=2, log=log, **settings)) == [0, 0], log.read_text()
    whole = make_trainer(tmp_path / "one", per_device_train_batch_size=2, **{**settings, "drafter": grown()})
    whole.train()
    parameters = [torch.load(tmp_path / "two" / f"final-{rank}.pt")["parameters"] for rank in (0, 1)]
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameters[0][name], parameters[1][name])
        torch.testing.assert_close(parameters[0][name], parameter.detach(), rtol=1e-4, atol=1e-6)
    resumed = make_trainer(tmp_path / "one", per_device_train_batch_size=2, **{**settings, "drafter": grown()})
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), parameter), name


def test_the_selector_alone_is_trained_cut_off_and_warmed_up(tmp_path):
    settings = {"trainable_modules": ["candidate_selector"], "selector_warmup_steps": 3, "selector_inject": True}
    trainer = make_trainer(
        tmp_path, drafter=grown(), max_steps=4, save_steps=4, selector_objective="dpace", **settings
    )
    frozen = trainer.model.fc.weight.clone()
    trainer.train()
    assert torch.equal(frozen, trainer.model.fc.weight)
    assert trainer.model.candidate_selector.successor_codebook.abs().max() > 0
    assert [trainer.args.selector_settings(4, step)["alpha"] for step in (0, 3, 9, None)] == [0.25, 1, 1, 1]
    with refused(ValueError, "selector_cut_off"):
        make_trainer(tmp_path / "other", selector_cut_off=True)


def test_the_command_grows_a_drafter_and_makes_a_new_one(tmp_path):
    target = dense_target()
    target.config.save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    words = [
        "--random_target_config",
        str(tmp_path / "target" / "config.json"),
        "--target",
        "none",
        "--dflash2",
        "true",
    ]
    words += ["--num_synthetic_documents", "4", "--synthetic_length", "32", "--row_length", "64", "--use_cpu", "true"]
    words += ["--selector_rank", "8", "--conv_group_size", "8", "--report_to", "none", "--save_strategy", "steps"]
    words += ["--max_steps", "1", "--save_steps", "1", "--target_model_init_kwargs", '{"dtype": "float32"}']
    for name, own in {
        "grown": ["--drafter", str(tmp_path / "drafter")],
        "new": ["--num_layers", "1", "--mask_token_id", "260"],
    }.items():
        main([*words, *own, "--output_dir", str(tmp_path / name)])
        config = json.loads((tmp_path / name / "checkpoint-1" / "config.json").read_text())
        assert config["architectures"] == ["DFlash2DraftModel"] and config["dflash_config"]["selector_rank"] == 8
    with refused(SystemExit):
        main([*words, "--dflash2", "false"])


def test_a_drafter_of_speculators_is_converted(tmp_path):
    drafter = random_dflash2(layer_types=[SLIDING, FULL], window=6, is_causal=False)
    own = {name: drafter.config.dflash_config[name] for name in GEOMETRY}
    # Its sliding layers are not causal by default.
    changes = {"speculators_model_type": "dflash2", **own}
    config = speculators_config(drafter, None, **changes)
    config.pop("sliding_window_non_causal")
    source = write_speculators(tmp_path / "source", config, drafter.state_dict())
    convert_speculators(source, tmp_path / "converted", num_target_layers=6)
    converted = DFlashDraftModel.from_pretrained(tmp_path / "converted")
    noise, context = torch.randn(1, 4, 32), torch.randn(1, 15, 64)
    assert torch.equal(converted(noise, context).last_hidden_state, drafter(noise, context).last_hidden_state)
    assert converted.config.dflash_config == drafter.config.dflash_config
    assert validate_checkpoint(tmp_path / "converted").ok


def test_a_drafter_that_continues_is_changed_and_adapted_as_one_of_dflash(tmp_path):
    drafter = random_dflash2(layer_types=[SLIDING, FULL], window=8)
    changed = adapt(drafter, block_size=6, target_layer_ids=[1, 2, 3])
    assert type(changed) is DFlash2DraftModel and changed.config.block_size == 6
    assert torch.equal(changed.candidate_selector.successor_codebook, drafter.candidate_selector.successor_codebook)
    with refused(ValueError, "conv_kernel_size"):
        adapt(random_dflash2(own={"conv_kernel_size": 3}, layer_types=[FULL]), block_size=2)
    grown().save_pretrained(tmp_path / "base")
    base, settings = DFlashDraftModel.from_pretrained(tmp_path / "base"), {"max_steps": 2, "save_steps": 2}
    make_trainer(tmp_path / "run", drafter=base, peft_config=lora_config(rank=2), **settings).train()
    merged = merge_adapter(tmp_path / "run" / "checkpoint-2")
    merged.save_pretrained(tmp_path / "merged")
    assert type(merged) is DFlash2DraftModel and validate_checkpoint(tmp_path / "merged").ok


def test_it_is_published_with_its_code(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drafter = random_dflash2(layer_types=[FULL])
    drafter.save_pretrained(tmp_path / "run")
    publish(["--drafter", "run", "--repo_id", "me/tiny-DFlash2", "--base_model", "org/target"])
    files = hub.repositories["me/tiny-DFlash2"].tree("main")
    assert {"modeling_dflash2.py", "configuration_dflash2.py", "modeling_dflash.py"} <= set(files)
    assert json.loads(files["config.json"])["auto_map"] == {"AutoModel": "modeling_dflash2.DFlash2DraftModel"}
    loaded = DFlashDraftModel.from_pretrained("me/tiny-DFlash2")
    expected = drafter.candidate_selector.successor_codebook.bfloat16()
    assert type(loaded) is DFlash2DraftModel and torch.equal(loaded.candidate_selector.successor_codebook, expected)


def test_a_target_that_scales_its_logits_differently_is_refused():
    drafter = grown()
    drafter.config.final_logit_softcapping = 20.0
    with refused(ValueError, "final_logit_softcapping", "20.0"):
        check_drafter(dense_target(), drafter)
    capped = dense_target()
    capped.config.final_logit_softcapping = 20.0
    check_drafter(capped, drafter)
    assert tiny_drafter(capped).config.to_dict().get("final_logit_softcapping") is None
    fields = {"num_hidden_layers": 2, "num_taps": 2, "mask_token_id": 260, "selector_rank": 4}
    config = DFlash2DraftConfig.from_target_config(capped.config, **fields)
    assert config.dflash_config["final_logit_softcapping"] == 20.0


# Decoding


def selecting(target, **fields):
    """A drafter whose selector changes many drafts, with windows and convolutions that matter, and sometimes right."""
    drafter = random_dflash2(
        own={"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 3},
        layer_types=[SLIDING, FULL],
        **{"window": 9, "hidden_size": 64, "vocab_size": 272, "mask_token_id": 260, **fields},
        num_target_layers=target.config.get_text_config().num_hidden_layers,
    )
    drafter.fc.weight.data.mul_(0.2)
    return drafter


def learned(target, documents):
    """A drafter of random hidden states, whose selector has learned some of the target's answers by heart."""
    folder = tempfile.mkdtemp()
    settings = {"max_steps": 60, "learning_rate": 5e-2, "save_strategy": "no", "row_length": 64}
    settings |= {"trainable_modules": ["candidate_selector"]}
    trainer = make_trainer(folder, target, documents, drafter=grown(target), **settings)
    trainer.train()
    return trainer.model.eval()


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def decoded(request):
    """A target, its greedy answers to three prompts, and a drafter that learned them."""
    target = {"dense": dense_target, "hybrid": hybrid_target}[request.param]()
    prompts = [PROMPT, PROMPT[:3], [200, *PROMPT]]
    documents = []
    for prompt in prompts:
        ids = target.generate(torch.tensor([prompt]), max_new_tokens=37, do_sample=False)[0].tolist()
        documents.append({"input_ids": ids, "supervised_spans": [[len(prompt), len(ids)]]})
    return target, prompts, documents, learned(target, documents)


@pytest.mark.parametrize("num_draft_tokens", [None, 2])
def test_greedy_decoding_is_lossless_and_visits_what_the_walk_does(decoded, num_draft_tokens):
    target, prompts, documents, drafter = decoded
    rows = [torch.tensor([prompt]) for prompt in prompts]
    outputs = speculative_generate_batch(target, drafter, rows, 37, [], num_draft_tokens=num_draft_tokens)
    walked = walk_documents(target, drafter, documents, num_draft_tokens=num_draft_tokens)
    for output, answer, document in zip(outputs, walked, documents, strict=True):
        assert output.sequences[0].tolist() == document["input_ids"]
        assert (output.committed, output.accepted) == (answer.committed, answer.accepted)
    assert len({n for output in outputs for n in output.committed}) >= 3


def test_the_walk_by_logits_and_candidates_bounds_the_selectors(decoded):
    target, _, documents, drafter = decoded
    frozen, head = FrozenTarget(target, drafter.config.target_layer_ids), FrozenHead(target, torch.device("cpu"))
    batch = DataCollatorForDFlash(4, num_anchors=4)([PackedDataset(documents, 256)[0]])
    context = frozen.context_hidden_states(batch["input_ids"], batch["document_lengths"])

    def tau(by):
        answers = walk_batch(drafter, drafter.config, head, batch, context, by=by)
        return sum(sum(a.committed) for a in answers) / sum(len(a.committed) for a in answers)

    by_selector, by_logits, by_candidates = tau("selector"), tau("logits"), tau("candidates")
    assert by_logits < by_selector <= by_candidates
    drafter_without = copy.deepcopy(drafter)
    drafter_without.candidate_selector.successor_codebook.data.zero_()
    answers = walk_batch(drafter_without, drafter.config, head, batch, context)
    assert by_logits == sum(sum(a.committed) for a in answers) / sum(len(a.committed) for a in answers)


@pytest.mark.parametrize("sample_drafts", [False, True])
@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_sampled_decoding_has_the_targets_distribution(name, sample_drafts):
    vocab_size, settings = 6, {"temperature": 1.3, "top_p": 0.95}
    make = {"dense": dense_target, "hybrid": hybrid_target}[name]
    target = make(num_layers=4, vocab_size=vocab_size, pad_token_id=None, eos_token_id=None)
    target.get_output_embeddings().weight.data *= 0.4
    fields = {"vocab_size": vocab_size, "mask_token_id": 1, "block_size": 3, "target_layer_ids": [0, 2]}
    drafter = selecting(
        target,
        **fields,
    )
    expected = exact(target, settings)
    rows = [torch.tensor([PROMPT_OF_FEW])] * 1500
    settings |= {"sample_drafts": sample_drafts, "generator": torch.Generator().manual_seed(0)}
    outputs = speculative_generate_batch(target, drafter, rows, 3, [], **settings)
    tokens = torch.cat([output.sequences[:, -3:] for output in outputs])
    cells = (tokens * torch.tensor([vocab_size**2, vocab_size, 1])).sum(dim=1)
    assert_drawn_from(torch.bincount(cells, minlength=vocab_size**3), expected)
