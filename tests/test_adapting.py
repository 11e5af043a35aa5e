# SPDX-License-Identifier: Apache-2.0
"""Changes of a drafter that continues, and the checks of target, tokenizer and data before it does."""

import datasets
import pytest
import torch
from naive import naive_drafter, random_drafter
from tiny import MASK_TOKEN_ID, VOCAB_SIZE, byte_tokenizer, dense_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments, FrozenTarget
from dflash_hf.adapting import (
    adapt,
    change_block_size,
    change_sliding_window,
    change_target_layer_ids,
    check_continuing,
)
from dflash_hf.data_collator import check_token_ids
from dflash_hf.packing import PackedDataset


FULL, SLIDING = "full_attention", "sliding_attention"
MIX = {"layer_types": [SLIDING, FULL], "window": 8}


def weights_are_equal(one: DFlashDraftModel, other: DFlashDraftModel, but: tuple[str, ...] = ()) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name], theirs[name]) for name in mine.keys() - {*but})


def hidden_states(drafter: DFlashDraftModel, context: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return drafter(noise, context).last_hidden_state


def random_taps(taps, tokens: int = 12, width: int = 32) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {tap: torch.randn(1, tokens, width, generator=generator) for tap in taps}


def context_of(states: dict[int, torch.Tensor], taps) -> torch.Tensor:
    return torch.cat([states[tap] for tap in taps], dim=-1)


@pytest.mark.parametrize("block_size", [2, 8])
def test_another_block_size_keeps_every_weight(tmp_path, block_size):
    drafter = random_drafter(**MIX)
    changed = change_block_size(drafter, block_size)
    assert changed is not drafter and weights_are_equal(changed, drafter)
    assert (changed.config.block_size, drafter.config.block_size) == (block_size, 4)
    noise, context = torch.randn(1, block_size, 32), torch.randn(1, 12, 64)
    expected = naive_drafter(drafter, context[0], noise[0], 12)
    torch.testing.assert_close(hidden_states(changed, context, noise)[0], expected, rtol=0, atol=1e-4)
    changed.save_pretrained(tmp_path)
    assert DFlashDraftModel.from_pretrained(tmp_path).config.dflash_config["block_size"] == block_size


def test_a_changed_drafter_shares_no_memory_with_the_old_one():
    drafter = random_drafter(**MIX)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    changed = change_block_size(drafter, 8)
    with torch.no_grad():
        for parameter in changed.parameters():
            assert parameter.requires_grad
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())


@pytest.mark.parametrize("is_causal", [None, True, False])
def test_dtype_mode_causality_and_model_type_stay(tmp_path, is_causal):
    drafter = random_drafter(**MIX, is_causal=is_causal, attention="eager", attention_bias=True)
    drafter.save_pretrained(tmp_path, dtype=torch.bfloat16)
    config = DFlashDraftConfig.from_dict({**drafter.config.to_dict(), "model_type": "gpt_oss"})
    drafter = DFlashDraftModel.from_pretrained(tmp_path, config=config, attn_implementation="eager").train()
    changed = adapt(drafter, block_size=8, sliding_window=16, target_layer_ids=[1, 2, 3])
    assert changed.dtype == torch.bfloat16 and changed.training
    assert changed.config._attn_implementation == "eager"
    assert changed.rotary_emb.inv_freq.dtype == torch.float32
    assert changed.config.is_causal is is_causal
    new, old = changed.config.to_dict(), drafter.config.to_dict()
    assert new["model_type"] == "gpt_oss"
    differing = {name for name in new.keys() | old.keys() if new.get(name) != old.get(name)}
    assert differing == {"block_size", "sliding_window", "dflash_config"}


def test_another_window_keeps_every_weight_and_hides_more():
    drafter = random_drafter(**MIX)
    changed = change_sliding_window(drafter, 5)
    assert weights_are_equal(changed, drafter)
    assert (changed.config.sliding_window, drafter.config.sliding_window) == (5, 8)
    assert changed.layers[0].self_attn.sliding_window == 5 and changed.layers[1].self_attn.sliding_window is None
    noise, context = torch.randn(1, 4, 32), torch.randn(1, 12, 64)
    output = hidden_states(changed, context, noise)
    torch.testing.assert_close(output[0], naive_drafter(changed, context[0], noise[0], 12), rtol=0, atol=1e-4)
    assert not torch.allclose(output, hidden_states(drafter, context, noise), atol=1e-3)


@pytest.mark.parametrize("taps", [[0, 1, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4]])
def test_added_taps_change_nothing_at_first(taps):
    drafter = random_drafter(**MIX)
    changed = change_target_layer_ids(drafter, taps)
    assert changed.config.target_layer_ids == taps and drafter.config.target_layer_ids == [1, 3]
    assert weights_are_equal(changed, drafter, but=("fc.weight",))
    states, noise = random_taps(range(6)), torch.randn(1, 4, 32)
    output = hidden_states(changed, context_of(states, taps), noise)
    expected = hidden_states(drafter, context_of(states, [1, 3]), noise)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


def test_kept_columns_move_with_their_tap_and_dropped_ones_go():
    drafter = random_drafter(**MIX)
    first, second = drafter.fc.weight.split(32, dim=1)
    changed = change_target_layer_ids(drafter, [0, 3])
    new, moved = changed.fc.weight.split(32, dim=1)
    assert torch.equal(moved, second) and not new.any() and first.any()
    back = change_target_layer_ids(changed, [1, 3]).fc.weight.split(32, dim=1)
    assert torch.equal(back[1], second) and not back[0].any()


def test_new_columns_learn_in_a_trainer(tmp_path):
    target = dense_target()
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=1, num_taps=2, mask_token_id=MASK_TOKEN_ID, block_size=4
    )
    taps = config.target_layer_ids
    drafter = adapt(DFlashDraftModel(config), target_layer_ids=sorted({*taps, 2}), block_size=8)
    documents = [{"input_ids": list(range(40)), "supervised_spans": [[5, 40]]}]
    arguments = DFlashTrainingArguments(
        output_dir=str(tmp_path),
        row_length=64,
        max_steps=1,
        warmup_steps=0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    DFlashTrainer(drafter, target, arguments, train_dataset=documents).train()
    new = drafter.config.target_layer_ids.index(2)
    assert drafter.fc.weight.split(64, dim=1)[new].abs().min() > 0


def test_adapt_changes_what_is_given_and_says_so(caplog):
    drafter = random_drafter(**MIX)
    with caplog.at_level("INFO", logger="dflash_hf.adapting"):
        assert adapt(drafter) is drafter
        assert adapt(drafter, block_size=4, sliding_window=8, target_layer_ids=[1, 3]) is drafter
        assert not caplog.records
        # A block of 16 needs the window of 20, a window of 2 the block of 2: the order must not matter.
        larger = adapt(drafter, block_size=16, sliding_window=20, target_layer_ids=[1, 3, 4])
        messages = [r.getMessage() for r in caplog.records if r.name == "dflash_hf.adapting"]
        smaller = adapt(drafter, block_size=2, sliding_window=2)
    assert len(messages) == 3
    assert sorted(m.split(".")[0] for m in messages) == [
        "block_size: 4 -> 16",
        "sliding_window: 8 -> 20",
        "target_layer_ids: [1, 3] -> [1, 3, 4]",
    ]
    assert (larger.config.block_size, larger.config.sliding_window) == (16, 20)
    assert (smaller.config.block_size, smaller.config.sliding_window) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": -8}, "block_size is -8"),
        ({"block_size": 9}, "sliding_window=8 is smaller than block_size=9"),
        ({"block_size": True}, "block_size holds True, a bool"),
        ({"block_size": "8"}, "block_size holds '8', a str"),
        ({"block_size": 8.0}, "block_size holds 8.0, a float"),
        ({"sliding_window": 3}, "sliding_window=3 is smaller than block_size=4"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"sliding_window": 10**9}, "larger than max_position_embeddings=32768"),
        ({"target_layer_ids": []}, "target_layer_ids is missing"),
        ({"target_layer_ids": [0, 2]}, r"keeps none of the drafter's taps \[1, 3\]"),
        ({"target_layer_ids": [3, 1]}, "unique and ascending"),
        ({"target_layer_ids": [1, 1]}, "unique and ascending"),
        ({"target_layer_ids": [1, 5]}, r"layers in 0\.\.4"),
        ({"target_layer_ids": [-1, 1]}, r"layers in 0\.\.4"),
        ({"target_layer_ids": [1, 2.0]}, "target_layer_ids holds 2.0"),
    ],
)
def test_nonsense_is_refused(changes, message):
    drafter = random_drafter(**MIX)
    with pytest.raises(ValueError, match=message):
        adapt(drafter, **changes)
    assert (drafter.config.block_size, drafter.config.sliding_window) == (4, 8)


def test_a_window_needs_a_sliding_layer():
    with pytest.raises(ValueError, match="no sliding layer"):
        adapt(random_drafter([FULL]), sliding_window=64)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(dense_target(), [1, 3])


def config_for(target: FrozenTarget, **overrides) -> DFlashDraftConfig:
    values = {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [1, 3], "num_hidden_layers": 1, **overrides}
    values |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return DFlashDraftConfig.from_target_config(target.config, **values)


def test_a_fitting_drafter_passes(target):
    for mask in (MASK_TOKEN_ID, VOCAB_SIZE - 1):
        check_continuing(config_for(target, mask_token_id=mask), target, byte_tokenizer())
    check_continuing(config_for(target), target)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"target_layer_ids": [1, 2]}, "target_layer_ids is"),
        ({"num_target_layers": 8}, "num_target_layers is 8"),
        ({"vocab_size": 300}, "vocab_size is 300"),
        ({"vocab_size": 300, "mask_token_id": 299}, "mask_token_id=299 is outside the target's embedding of 272 rows"),
    ],
)
def test_a_drafter_for_another_target_is_refused(target, overrides, message):
    with pytest.raises(ValueError, match=message):
        check_continuing(config_for(target, **overrides), target)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (65, "mask_token_id=65 is 'b', which is a token in use: the tokenizer writes it for ordinary text"),
        (256, r"mask_token_id=256 is '<\|endoftext\|>', .*the chat template writes it"),
        (257, r"mask_token_id=257 is '<\|im_start\|>', .*bos token"),
        (258, r"mask_token_id=258 is '<\|im_end\|>', .*eos token"),
        (259, r"mask_token_id=259 is '<\|pad\|>', .*pad token"),
        (260, r"mask_token_id=260 is '<\|plain\|>', .*ordinary text"),
        (261, None),
    ],
)
@pytest.mark.parametrize("named_templates", [False, True])
def test_the_mask_must_be_a_token_that_texts_do_not_use(target, mask, message, named_templates):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|plain|>"])
    tokenizer.add_tokens(["<|reserved|>"], special_tokens=True)
    template = tokenizer.chat_template + "<|endoftext|>"
    tokenizer.chat_template = {"default": "{{ 0 }}", "tool_use": template} if named_templates else template
    config = config_for(target, mask_token_id=mask)
    if message is None:
        check_continuing(config, target, tokenizer)
        return
    with pytest.raises(ValueError, match=message) as error:
        check_continuing(config, target, tokenizer)
    assert "that it was trained" in str(error.value)


def test_the_mask_must_not_end_the_targets_texts():
    model = dense_target()
    model.generation_config.eos_token_id = [258, 265]
    target = FrozenTarget(model, [1, 3])
    with pytest.raises(ValueError, match="mask_token_id=265 ends the target's texts"):
        check_continuing(config_for(target, mask_token_id=265), target)


@pytest.mark.parametrize("kind", ["list", "dataset", "shuffled", "packed"])
def test_the_mask_must_not_occur_in_the_documents(kind):
    documents = [{"input_ids": list(range(3 + i % 5)), "supervised_spans": [[1, 3]]} for i in range(2500)]
    dirty = [*documents, {"input_ids": [5, MASK_TOKEN_ID], "supervised_spans": [[0, 2]]}, *documents]
    make = {
        "list": list,
        "dataset": datasets.Dataset.from_list,
        # The table behind it still holds the dirty document in the clean case.
        "shuffled": lambda data: datasets.Dataset.from_list(dirty).select(
            range(len(data)) if len(data) > 2500 else range(2499, -1, -1)
        ),
        "packed": lambda data: PackedDataset(datasets.Dataset.from_list(data), 64).documents,
    }[kind]
    check_token_ids(make(documents), VOCAB_SIZE, MASK_TOKEN_ID)
    with pytest.raises(ValueError, match=r"mask_token_id=260.* occurs in the input_ids of document 2500"):
        check_token_ids(make(dirty), VOCAB_SIZE, MASK_TOKEN_ID)
