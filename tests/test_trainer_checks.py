# SPDX-License-Identifier: Apache-2.0
"""What the trainer says about data, tokens and arguments that cannot work, before any step is taken."""

import datasets
import pytest
import torch
from test_trainer import make_arguments, make_documents, make_drafter, make_trainer
from tiny import CHATML_TEMPLATE, MASK_TOKEN_ID, byte_tokenizer, dense_target, hybrid_target

from dflash_hf import DataCollatorForDFlash, DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, PackedDataset
from dflash_hf.trainer import add_context_noise


@pytest.fixture(scope="module")
def target():
    return dense_target()


@pytest.mark.parametrize("packed", [False, True])
def test_token_ids_outside_the_embedding_are_refused(target, tmp_path, packed):
    documents = make_documents(3)
    documents[1]["input_ids"][4] = 272
    with pytest.raises(ValueError, match=r"Document 1 holds the token id 272.*272 rows.*tokenizer"):
        make_trainer(target, tmp_path, documents=PackedDataset(documents, 32) if packed else documents)


def test_the_mask_token_in_the_data_is_refused(target, tmp_path):
    documents = make_documents(3)
    documents[2]["input_ids"][4] = MASK_TOKEN_ID
    with pytest.raises(ValueError, match="mask_token_id=260 occurs in the input_ids of document 2"):
        make_trainer(target, tmp_path, documents=documents)


def test_a_mask_token_that_ends_the_targets_texts_is_refused(tmp_path):
    target = dense_target()
    target.generation_config.eos_token_id = [258, MASK_TOKEN_ID]
    with pytest.raises(ValueError, match=f"mask_token_id={MASK_TOKEN_ID} ends the target's texts"):
        make_trainer(target, tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(make_documents(2))}), "DatasetDict.*one split"),
        ([*make_documents(1), {"input_ids": [1, 2]}], r"Row 1 of the data has the columns \['input_ids'\]"),
        ([], "The data has no documents"),
        ("completions.jsonl", "The data is a str"),
    ],
)
def test_data_of_another_kind_is_refused(target, tmp_path, data, message):
    arguments = make_arguments(tmp_path)
    with pytest.raises(ValueError, match=message):
        DFlashTrainer(make_drafter(target), target, arguments, train_dataset=data)


@pytest.mark.parametrize(
    "overrides",
    [
        {"block_size": 8},
        {"num_taps": None, "target_layer_ids": [2, 4]},
        {"mask_token_id": 261},
        {"num_hidden_layers": 1},
    ],
)
def test_a_checkpoint_of_another_drafter_is_not_resumed(target, tmp_path, overrides):
    arguments = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    make_trainer(target, tmp_path, **arguments).train()
    if "target_layer_ids" in overrides:
        config = make_drafter(target).config.to_dict()
        config["dflash_config"] |= overrides
        drafter = DFlashDraftModel(DFlashDraftConfig.from_dict(config))
    else:
        drafter = make_drafter(target, **overrides)
    other = make_trainer(target, tmp_path, drafter=drafter, **{**arguments, "max_steps": 2})
    with pytest.raises(ValueError, match=r"checkpoint-1 is of another drafter.*adapt"):
        other.train(resume_from_checkpoint=True)


def test_a_drafter_given_by_folder_continues(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    trainer = DFlashTrainer(tmp_path / "drafter", target, make_arguments(tmp_path), train_dataset=make_documents(2))
    for given, expected in zip(trainer.model.parameters(), make_drafter(target).parameters(), strict=True):
        assert torch.equal(given, expected)


def test_arguments_that_would_have_no_effect_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        make_arguments(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="compute_metrics would never be called"):
        DFlashTrainer(make_drafter(target), target, make_arguments(tmp_path), compute_metrics=lambda p: {})


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_t5_casting_the_masters_for_evaluation_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}=True.*fp32 masters"):
        make_arguments(tmp_path, **{name: True})


def test_hb1_a_token_among_the_arguments_is_refused(tmp_path):
    with pytest.raises(ValueError, match="HF_TOKEN") as error:
        make_arguments(tmp_path, target_model_init_kwargs={"token": "planted-secret"})
    assert "planted-secret" not in str(error.value)


def test_a_collator_of_another_block_size_is_refused(target, tmp_path):
    collator, documents = DataCollatorForDFlash(block_size=8), make_documents(2)
    trainer = DFlashTrainer(make_drafter(target), target, make_arguments(tmp_path), collator, documents)
    with pytest.raises(ValueError, match="blocks of 8 slots, the drafter's block_size is 4"):
        trainer.train()


def test_thinking_is_handed_to_the_template(target, tmp_path):
    written = "{% if enable_thinking %}T{% endif %}"
    template = CHATML_TEMPLATE.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n" + written + "{%")
    template = template.replace("\n{{ message['content'] }}", "\n{% if message['role'] == 'assistant' %}" + written
                                + "{% endif %}{{ message['content'] }}")  # fmt: skip
    tokenizer = byte_tokenizer(template)
    assert template.count("enable_thinking") == 2
    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}]
    starts = []
    for enable_thinking in (True, False):
        arguments = make_arguments(tmp_path, row_length=96, enable_thinking=enable_thinking)
        trainer = DFlashTrainer(
            make_drafter(target), target, arguments, train_dataset=chats, processing_class=tokenizer
        )
        starts.append(trainer.train_dataset[0]["documents"][0]["supervised_spans"][0][0])
    # With thinking the generation prompt itself writes the "T".
    assert starts[0] == starts[1] + 1


def test_l4_noise_reaches_large_hidden_states_of_a_bf16_target(tmp_path):
    """In bf16 a step of 0.05 beside a value of 32 is rounded away."""
    trainer = make_trainer(dense_target().bfloat16(), tmp_path, context_noise=0.05)
    seen = []
    handle = trainer.model.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    trainer.target.context_hidden_states = lambda ids, lengths: torch.full((*ids.shape, 128), 32.0).bfloat16()
    trainer.train()
    handle.remove()
    assert (seen[0] != 32.0).float().mean() > 0.9
    assert (seen[0] - 32.0).abs().max() <= 0.05 + 1e-6


def test_noise_of_zero_is_the_input_itself():
    context = torch.randn(1, 4, 8)
    assert add_context_noise(context, [[4]], [[1]], 0.0) is context


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("make_target", [dense_target, hybrid_target])
def test_h1_a_documents_context_is_its_own_whatever_side_the_tokenizer_pads(tmp_path, make_target, padding_side):
    target, tokenizer = make_target(), byte_tokenizer()
    tokenizer.padding_side = padding_side
    chats = [
        {"messages": [{"role": "user", "content": "ab" * n}, {"role": "assistant", "content": "cde" * n}]}
        for n in (1, 2, 4)
    ]
    arguments = make_arguments(tmp_path, row_length=512, per_device_train_batch_size=2)
    trainer = DFlashTrainer(make_drafter(target), target, arguments, train_dataset=chats, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    context = trainer.target.context_hidden_states(batch["input_ids"], batch["document_lengths"])
    (lengths,), start = batch["document_lengths"], 0
    assert len(lengths) == 3 and len(set(lengths)) == 3
    for length in lengths:
        part = slice(start, start + length)
        states = target(batch["input_ids"][:, part], output_hidden_states=True, use_cache=False).hidden_states
        alone = torch.cat([states[i + 1] for i in trainer.target.target_layer_ids], dim=-1)
        torch.testing.assert_close(context[:, part], alone, rtol=1e-5, atol=1e-5)
        start += length
