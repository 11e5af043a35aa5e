# SPDX-License-Identifier: Apache-2.0
"""Continuing from a saved drafter: the same run as without the save, and no loss of what it had learned."""

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from naive import naive_mask
from published import QWEN36_27B, small, small_tensors, write_folder
from tiny import MASK_TOKEN_ID, VOCAB_SIZE, dense_target
from transformers import TrainerCallback

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.cli import parse_config


FULL, SLIDING = "full_attention", "sliding_attention"
RECIPE = Path(__file__).parents[1] / "recipes" / "qwen3.6-27b" / "continue.yaml"
MIX = {"layer_types": [SLIDING, FULL], "sliding_window": 8, "use_sliding_window": True}
FIELDS = {
    "full": {},
    "sliding_and_full": MIX,
    "all_bidirectional": {**MIX, "is_causal": False},
    "all_causal": {**MIX, "is_causal": True},
}


@pytest.fixture(scope="module")
def target():
    return dense_target(seed=53)


def written_documents(target, count: int, new_tokens: int) -> list[dict]:
    """Random prompts of one length with the target's own greedy answers."""
    prompts = torch.randint(0, 256, (count, 9), generator=torch.Generator().manual_seed(0))
    answers = target.generate(prompts, max_new_tokens=new_tokens, do_sample=False).tolist()
    return [{"input_ids": ids, "supervised_spans": [[9, len(ids)]]} for ids in answers]


def make_drafter(target, **overrides) -> DFlashDraftModel:
    values = {"num_hidden_layers": 2, "mask_token_id": MASK_TOKEN_ID, "block_size": 4, **overrides}
    torch.manual_seed(0)
    return DFlashDraftModel(DFlashDraftConfig.from_target_config(target.config, **values))


def train(drafter, target, documents, folder, callbacks=None, **overrides) -> DFlashTrainer:
    values = {
        "output_dir": str(folder),
        "row_length": 64,
        "max_anchors_per_row": 64,
        "max_steps": 20,
        "learning_rate": 1e-3,
        "logging_steps": 1000,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        **overrides,
    }
    arguments = DFlashTrainingArguments(**values)
    trainer = DFlashTrainer(
        drafter, target, arguments, train_dataset=documents, eval_dataset=documents, callbacks=callbacks
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", FIELDS)
def test_continuing_from_a_saved_drafter_equals_training_on(target, tmp_path, name):
    documents = written_documents(target, 6, 30)
    drafter = make_drafter(target, **FIELDS[name])
    train(drafter, target, documents, tmp_path)
    drafter.save_pretrained(tmp_path / "saved")
    start = {key: tensor.clone() for key, tensor in drafter.state_dict().items()}

    train(drafter, target, documents, tmp_path, seed=1)
    reloaded = DFlashDraftModel.from_pretrained(tmp_path / "saved")
    assert reloaded.dtype == torch.float32
    train(reloaded, target, documents, tmp_path, seed=1)
    for key, tensor in drafter.state_dict().items():
        assert not torch.equal(tensor, start[key]), f"{key} was not trained"
        assert torch.equal(tensor, reloaded.state_dict()[key]), key


def test_continuing_from_the_trainers_own_folder_equals_training_on(target, tmp_path):
    documents = written_documents(target, 6, 30)
    trainer = train(make_drafter(target, **MIX), target, documents, tmp_path)
    trainer.save_model(tmp_path / "saved")
    train(trainer.model, target, documents, tmp_path, seed=1)
    reloaded = DFlashDraftModel.from_pretrained(tmp_path / "saved")
    train(reloaded, target, documents, tmp_path, seed=1)
    for key, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, reloaded.state_dict()[key]), key


@pytest.mark.parametrize("name", ["sliding_and_full", "all_bidirectional", "all_causal"])
def test_each_layer_stays_as_causal_as_it_was(target, tmp_path, monkeypatch, name):
    """Of a drafter that was saved, reloaded, trained, saved and reloaded again."""
    documents = written_documents(target, 6, 30)
    make_drafter(target, **FIELDS[name]).save_pretrained(tmp_path / "saved")
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "saved")
    batches, masks = [], []
    compute_loss = DFlashTrainer.compute_loss

    def recorded(self, model, inputs, *args, **kwargs):
        batches.append(inputs)
        return compute_loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(DFlashTrainer, "compute_loss", recorded)
    drafter.register_forward_pre_hook(lambda m, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    train(drafter, target, documents, tmp_path, max_steps=1)
    override = FIELDS[name].get("is_causal")
    for layer_type, causal, window in ((SLIDING, True, 8), (FULL, False, None)):
        causal = causal if override is None else override
        expected = naive_mask(batches[0]["anchor_positions"], batches[0]["document_ids"], 4, causal, window)
        assert torch.equal(masks[0][layer_type].dense()[:, 0], expected)
    drafter.save_pretrained(tmp_path / "again")
    again = DFlashDraftConfig.from_pretrained(tmp_path / "again")
    assert again.is_causal == override
    assert [again.layer_is_causal(i) for i in range(2)] == [drafter.config.layer_is_causal(i) for i in range(2)]


def test_a_published_bf16_drafter_is_trained_and_saved_as_it_came(target, tmp_path):
    published = small(
        QWEN36_27B,
        hidden_size=64,
        vocab_size=VOCAB_SIZE,
        eos_token_id=258,
        pad_token_id=259,
        num_target_layers=6,
        sliding_window=16,
        dflash_config={"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [0, 1, 2, 3, 4]},
    )
    tensors = {name: tensor.mul(0.1) for name, tensor in small_tensors(published).items()}
    drafter = DFlashDraftModel.from_pretrained(write_folder(tmp_path / "published", published, tensors))
    assert drafter.dtype == torch.bfloat16
    trainer = train(drafter, target, written_documents(target, 6, 30), tmp_path, max_steps=2, learning_rate=2e-5)
    # Steps of this size vanish in bf16.
    assert drafter.dtype == torch.float32
    for name, parameter in trainer.model.named_parameters():
        assert not torch.equal(parameter, tensors[name].float()), f"{name} was not trained"
    trainer.model.save_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    saved = DFlashDraftConfig.from_pretrained(tmp_path / "saved").to_dict()
    kept = published.keys() - {"auto_map", "transformers_version", "dflash_config"}
    assert {name: saved[name] for name in kept} == {name: published[name] for name in kept}
    assert saved["dflash_config"].items() >= published["dflash_config"].items()


@dataclass
class RecipeArguments:
    """What recipes/train_qwen36.py takes for a drafter that continues, besides the training arguments."""

    drafter: str
    target: str
    completions: str
    block_size: int | None = None
    sliding_window: int | None = None
    target_layer_ids: list[int] | None = None


def recipe_arguments() -> tuple[RecipeArguments, DFlashTrainingArguments]:
    """The recipe as its script reads it, on a CPU. Unknown fields are errors."""
    argv = ["--config", str(RECIPE), "--completions", "chats.jsonl", "--bf16", "false", "--use_cpu", "true"]
    return parse_config((RecipeArguments, DFlashTrainingArguments), argv)


def test_the_recipe_is_a_warm_start_of_the_published_drafter():
    recipe, arguments = recipe_arguments()
    assert recipe == RecipeArguments("z-lab/Qwen3.6-27B-DFlash", "Qwen/Qwen3.6-27B", "chats.jsonl")
    defaults = DFlashTrainingArguments(output_dir="unused", use_cpu=True)
    assert 1e-5 <= arguments.learning_rate <= 3e-5 < defaults.learning_rate
    assert defaults.warmup_steps < arguments.warmup_steps < 1


class AcceptanceCurve(TrainerCallback):
    """The acceptance length after every tenth step."""

    def __init__(self):
        self.values: list[float] = []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.values.append(metrics["eval_acceptance_length"])


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [10, 120], ids=["half_trained", "well_trained"])
def test_a_warm_start_keeps_the_acceptance_length(target, tmp_path, epochs):
    """At the recipe's learning rate it never falls by 1% in 200 steps; at one for training from nothing it does."""
    documents = written_documents(target, 24, 40)
    sizes = {"row_length": 128, "max_anchors_per_row": 128}
    drafter = make_drafter(target, block_size=8, **{**MIX, "sliding_window": 16})
    trained = train(
        drafter, target, documents, tmp_path, max_steps=-1, num_train_epochs=epochs, learning_rate=3e-3, **sizes
    )
    start = trained.evaluate()["eval_acceptance_length"]
    assert start > 2.0, "there is something to lose"
    _, recipe = recipe_arguments()
    names = ("warmup_steps", "lr_scheduler_type", "max_grad_norm", "weight_decay", "context_noise", "objective")
    warm = {name: getattr(recipe, name) for name in (*names, "learning_rate")}
    lowest = {}
    for kind, options in (("warm", warm), ("from_nothing", {**warm, "learning_rate": 3e-3, "warmup_steps": 0.04})):
        curve = AcceptanceCurve()
        steps = {"max_steps": 200, "eval_strategy": "steps", "eval_steps": 10, "seed": 1}
        train(copy.deepcopy(drafter), target, documents, tmp_path, [curve], **options, **steps, **sizes)
        assert len(curve.values) == 20
        lowest[kind] = min(curve.values) / start
    assert lowest["warm"] >= 0.99, lowest
    # A half-trained drafter falls less, since the high rate soon improves it.
    bound = 0.99 if epochs == 120 else lowest["warm"]
    assert lowest["from_nothing"] < bound, f"the check sees a fall: {lowest}"
