# SPDX-License-Identifier: Apache-2.0
"""The drafter: training equals decoding and z-lab's reference (tests/reference.txt); loading and saving."""

import copy
import importlib
import inspect
import json
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from naive import naive_drafter, oracle_forward, pack_rows, packed_forward, random_drafter, random_inputs
from published import FULL, GPT_OSS_20B, PUBLISHED, QWEN3_8B, QWEN36_27B, SLIDING, inputs_for, small, write_folder
from safetensors.torch import load, load_file
from tiny import dense_target, llama_target, refused, tiny_drafter
from transformers import Qwen3Config
from transformers.cache_utils import DFlashCache

from dflash_hf import DFlashDraftConfig, DFlashDraftModel


pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")

QWEN36 = [SLIDING] * 4 + [FULL]
DRAFTERS = {
    "full": {"layer_types": [FULL, FULL]},
    "sliding": {"layer_types": [SLIDING, SLIDING], "window": 7},
    "qwen36_mix": {"layer_types": QWEN36, "window": 6},
    "window_of_one_block": {"layer_types": [SLIDING, FULL], "window": 4},
    "all_causal": {"layer_types": [SLIDING, FULL], "window": 6, "is_causal": True},
    "all_bidirectional": {"layer_types": [SLIDING, FULL], "window": 6, "is_causal": False},
    "biases": {"layer_types": [SLIDING, FULL], "window": 6, "attention_bias": True},
    "one_tap": {"layer_types": [FULL], "target_layer_ids": [2]},
    "block_of_two": {"layer_types": [SLIDING, FULL], "window": 6, "block_size": 2},
    "block_of_sixteen": {"layer_types": [SLIDING, FULL], "window": 16, "block_size": 16},
}
ROWS = {
    # Odd lengths, anchors at position 0, beyond the window, overlapping, at the last token of a document.
    "three_documents": pack_rows([[(23, [0, 1, 9, 18, 22]), (7, [0, 6]), (5, [2])]]),
    "two_rows_padded": pack_rows([[(11, [3, 4]), (9, [0, 8])], [(17, [13])]], padding=3, unused=2),
}


def assert_close(actual, expected):
    """Equal to 5e-5 of the largest value expected, or 5e-5 where all are below one.

    One rounding of each product comes to 1.6e-5 of it (S1).
    """
    tolerance = 5e-5 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def new_cache(drafter):
    cache = DFlashCache(config=drafter.config)
    cache.activate_past_recording()
    return cache


def cached_round(drafter, cache, noise_embeds, context, first_position, **kwargs):
    """One drafting round as transformers runs it: announce the new context rows, draft, drop the block's keys."""
    num_context, block_size = context.shape[1], noise_embeds.shape[1]
    cache.set_previous_accepted_tokens(num_context)
    positions = first_position + torch.arange(num_context + block_size)[None]
    hidden = drafter(noise_embeds, context, position_ids=positions, cache=cache, **kwargs).last_hidden_state
    cache.crop(-block_size)
    return hidden


# Training equals decoding


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("fields", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("twin", ["cached_block", "naive"])
def test_golden_packed_training_equals_one_block_at_a_time(fields, rows, twin):
    """Hidden states and gradients of N anchors in one forward against N forwards of one block of one document."""
    drafter = random_drafter(**fields)
    block_size = drafter.config.block_size
    noise, context = random_inputs(drafter, rows)
    inputs = [*drafter.parameters(), noise.requires_grad_(), context.requires_grad_()]
    packed = packed_forward(drafter, rows, noise, context)
    cotangent = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
    packed_loss, single_loss = 0.0, 0.0
    for row, index, start, anchor in rows.blocks:
        slots = slice(index * block_size, (index + 1) * block_size)
        block = noise[row : row + 1, slots]
        if twin == "naive":
            single = naive_drafter(drafter, context[row, start:], block[0], anchor)
        else:
            taps = context[row : row + 1, start : start + anchor]
            single = cached_round(drafter, new_cache(drafter), block, taps, 0)[0]
        assert_close(packed[row, slots], single)
        packed_loss = packed_loss + (packed[row, slots] * cotangent[row, slots]).sum()
        single_loss = single_loss + (single * cotangent[row, slots]).sum()
    for actual, expected in zip(
        torch.autograd.grad(packed_loss, inputs), torch.autograd.grad(single_loss, inputs), strict=True
    ):
        assert expected.abs().max() > 0
        assert_close(actual, expected)


@pytest.mark.parametrize("fields", DRAFTERS.values(), ids=DRAFTERS)
def test_golden_packed_training_equals_cached_rounds(fields):
    """One cache over all anchors of a document in turn: each round adds only the context rows since the last one."""
    rows = ROWS["three_documents"]
    drafter = random_drafter(**fields)
    noise, context = random_inputs(drafter, rows)
    with torch.no_grad():
        packed = packed_forward(drafter, rows, noise, context)
        caches, known = {}, {}
        for row, index, start, anchor in rows.blocks:
            cache, done = caches.setdefault(start, new_cache(drafter)), known.get(start, 0)
            slots = slice(index * drafter.config.block_size, (index + 1) * drafter.config.block_size)
            taps = context[:, start + done : start + anchor]
            assert_close(cached_round(drafter, cache, noise[:, slots], taps, done)[0], packed[row, slots])
            known[start] = anchor


@pytest.mark.parametrize("fields", DRAFTERS.values(), ids=DRAFTERS)
def test_e6_after_each_round_the_cache_holds_committed_context_and_nothing_else(fields):
    drafter = random_drafter(**fields)
    context = torch.randn(1, 20, drafter.fc.in_features)
    used, fresh = new_cache(drafter), new_cache(drafter)
    with torch.no_grad():
        done = 0
        for anchor in (3, 4, 11, 20):
            cached_round(drafter, used, torch.randn(1, 4, 32), context[:, done:anchor], done)
            done = anchor
            assert [used.get_seq_length(i) for i in range(len(drafter.layers))] == [anchor] * len(drafter.layers)
        cached_round(drafter, fresh, torch.randn(1, 4, 32), context, 0)
    for left, right in zip(used.layers, fresh.layers, strict=True):
        assert_close(left.keys, right.keys)
        assert_close(left.values, right.values)


def test_md7_decoding_equals_training_on_either_side_of_the_window():
    """Window 4, anchor 10: only context 7..9 matters to a sliding layer, in training and in decoding alike."""
    drafter = random_drafter([SLIDING], window=4)
    rows = pack_rows([[(12, [10])]])
    noise, context = random_inputs(drafter, rows)
    outside, inside = context.clone(), context.clone()
    outside[:, :7] += 1.0
    inside[:, 7] += 1.0
    with torch.no_grad():
        hidden = packed_forward(drafter, rows, noise, context)
        assert torch.equal(packed_forward(drafter, rows, noise, outside), hidden)
        assert not torch.allclose(packed_forward(drafter, rows, noise, inside), hidden)
        for other in (context, outside):
            assert_close(cached_round(drafter, new_cache(drafter), noise, other[:, :10], 0), hidden)


@pytest.mark.parametrize("cached", [0, 8, 12])
def test_padding_before_the_context_changes_nothing(cached):
    """A 2-D mask over all keys hides left padding; positions count from the first real token."""
    drafter = random_drafter(QWEN36, window=6)
    noise, context = torch.randn(1, 4, 32), torch.randn(1, 13, 64)
    positions = torch.cat([torch.zeros(3, dtype=torch.long), torch.arange(14)])[None]
    mask = (torch.arange(17) >= 3).long()[None]
    with torch.no_grad():
        expected = drafter(noise, context[:, 3:]).last_hidden_state
        cache = new_cache(drafter)
        if cached:
            cache.set_previous_accepted_tokens(cached)
            drafter(noise, context[:, :cached], mask[:, : cached + 4], positions[:, : cached + 4], cache=cache)
            cache.crop(-4)
        cache.set_previous_accepted_tokens(13 - cached)
        actual = drafter(noise, context[:, cached:], mask, positions[:, cached:], cache=cache).last_hidden_state
    assert_close(actual, expected)


def test_default_positions_follow_the_cache():
    drafter = random_drafter([SLIDING, FULL], window=6)
    noise, context = torch.randn(1, 4, 32), torch.randn(1, 9, 64)
    with torch.no_grad():
        expected = naive_drafter(drafter, context[0], noise[0], 9)
        assert_close(drafter(noise, context).last_hidden_state[0], expected)
        cache = new_cache(drafter)
        drafter(noise, context[:, :5], cache=cache)
        cache.crop(-4)
        output = drafter(noise, context[:, 5:], cache=cache)
        assert_close(output.last_hidden_state[0], expected)
        assert output.cache is cache
        assert isinstance(drafter(noise, context, use_cache=True).cache, DFlashCache)
        assert drafter(noise, context).cache is None
        # The name that transformers' own loop still uses.
        other = new_cache(drafter)
        with pytest.warns(FutureWarning, match="past_key_values"):
            drafter(noise, context, past_key_values=other)
        assert other.get_seq_length() == 13


def test_d3_no_buffer_is_made_or_changed_by_a_forward_or_by_loading(tmp_path):
    drafter = random_drafter([SLIDING, FULL], window=6)
    before = {name: buffer.clone() for name, buffer in drafter.named_buffers()}
    packed_forward(drafter, ROWS["two_rows_padded"], *random_inputs(drafter, ROWS["two_rows_padded"]))
    drafter.save_pretrained(tmp_path)
    for model in (drafter, DFlashDraftModel.from_pretrained(tmp_path)):
        after = dict(model.named_buffers())
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], buffer) for name, buffer in before.items())


def test_bf16_forward_stays_near_fp32():
    drafter = random_drafter(QWEN36, window=6)
    rows = ROWS["three_documents"]
    noise, context = random_inputs(drafter, rows)
    with torch.no_grad():
        expected = packed_forward(drafter, rows, noise, context)
        cast = copy.deepcopy(drafter).to(torch.bfloat16)
        actual = packed_forward(cast, rows, noise.bfloat16(), context.bfloat16())
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).pow(2).mean().sqrt() < 0.05


def test_unknown_arguments_are_refused_and_nothing_swallows_them():
    """A forward with **kwargs would also make Trainer believe that the loss is scaled already."""
    drafter = random_drafter([FULL])
    with refused(TypeError, "past_key_value"):
        drafter(torch.randn(1, 4, 32), torch.randn(1, 9, 64), past_key_value=new_cache(drafter))
    for module in drafter.modules():
        if type(module).__module__.startswith("dflash_hf"):
            kinds = [p.kind for p in inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()]
            assert inspect.Parameter.VAR_KEYWORD not in kinds


# The reference implementation, and decoding with transformers' own loop

REQUIREMENT = next(
    line for line in Path(__file__).with_name("reference.txt").read_text().splitlines() if line.startswith("dflash==")
)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The reference's model module, in exactly the release that the tests were written for."""
    install = "run `pip install --no-deps -r tests/reference.txt`"
    try:
        installed = version("dflash")
        module = importlib.import_module("dflash.model")
    except (PackageNotFoundError, ImportError) as error:
        pytest.fail(f"These tests compare with {REQUIREMENT}, which cannot be imported ({error}): {install}.")
    if f"dflash=={installed}" != REQUIREMENT:
        pytest.fail(f"These tests compare with {REQUIREMENT}, but {installed} is installed: {install}.")
    return module


@pytest.mark.parametrize("fields", DRAFTERS.values(), ids=DRAFTERS)
def test_hidden_states_and_gradients_equal_the_references(reference, tmp_path, fields):
    """All blocks of packed documents in one forward of ours against one block at a time of the reference's."""
    drafter = random_drafter(**fields)
    drafter.save_pretrained(tmp_path)
    theirs = reference.DFlashDraftModel.from_pretrained(tmp_path).eval()
    rows = pack_rows([[(21, [1, 3, 8, 20]), (9, [4])], [(13, [6, 12])]], padding=2, unused=1)
    noise, context = random_inputs(drafter, rows)
    packed = packed_forward(drafter, rows, noise, context)
    losses = [0.0, 0.0]
    for row, index, start, anchor in rows.blocks:
        slots = slice(index * drafter.config.block_size, (index + 1) * drafter.config.block_size)
        block, taps = noise[row : row + 1, slots], context[row : row + 1, start : start + anchor]
        positions = torch.arange(anchor + drafter.config.block_size)[None]
        expected = theirs(noise_embedding=block, target_hidden=taps, position_ids=positions)
        assert_close(packed[row : row + 1, slots], expected)
        assert_close(drafter(block, taps).last_hidden_state, expected)
        losses = [losses[0] + packed[row, slots].pow(3).mean(), losses[1] + expected.pow(3).mean()]
    for loss in losses:
        loss.backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in drafter.named_parameters():
        assert expected[name].grad.abs().max() > 0
        assert_close(parameter.grad, expected[name].grad)


# The window is shorter than the prompt, so that it hides something from the first block on.
MIX = {"layer_types": [SLIDING, FULL], "sliding_window": 11, "use_sliding_window": True}
SAVED = {
    "full": {},
    "mix": MIX,
    "all_causal": {**MIX, "is_causal": True},
    "all_bidirectional": {**MIX, "is_causal": False},
    "full_made_causal": {"is_causal": True},
    "biases": {**MIX, "attention_bias": True},
}
TARGETS = {"qwen3_untied": dense_target, "llama_tied": llama_target}


def saved_drafter(target, folder, dtype=None, **fields) -> DFlashDraftModel:
    drafter = tiny_drafter(target, seed=1, block_size=6, **fields)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            # Attention far from uniform, so that slots draft different tokens; norms and biases not at their start.
            parameter.add_(torch.randn_like(parameter) * (parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 0.2))
            if name.endswith("q_norm.weight"):
                parameter.mul_(8.0)
    drafter.save_pretrained(folder, dtype=dtype)
    return drafter


def prompt_and_answer(target) -> tuple[torch.Tensor, list[int], int]:
    """A prompt of 13 tokens, prompt and greedy answer, and a token that ends the answer at its first occurrence.

    The reference shortens its last block at the budget, so the answer ends well before it.
    """
    prompt = torch.randint(0, 256, (1, 13), generator=torch.Generator().manual_seed(3))
    greedy = target.generate(prompt, max_new_tokens=80, do_sample=False)[0].tolist()
    return prompt, greedy, next(token for i, token in enumerate(greedy) if i >= 45 and token not in greedy[13:i])


def drafts(rounds: list[dict], target) -> list[list[int]]:
    """The tokens that each round drafts, before the oracle made some of them right."""
    head = target.get_output_embeddings().weight
    with torch.inference_mode():
        return [(r["hidden"][0, 1:] @ head.T).argmax(-1).tolist() for r in rounds]


@pytest.mark.parametrize(
    ("name", "dtype", "family"),
    [
        *((name, torch.float32, "qwen3_untied") for name in SAVED),
        *((name, torch.bfloat16, "qwen3_untied") for name in ("full", "mix")),
        *((name, torch.float32, "llama_tied") for name in ("full", "mix")),
    ],
)
def test_a_saved_folder_drafts_the_same_in_the_reference_and_in_generate(
    reference, monkeypatch, tmp_path, name, dtype, family
):
    """Tokens, anchors and hidden states of each round, by transformers' loop and by the reference's."""
    target = TARGETS[family]()
    saved_drafter(target, tmp_path, dtype, **SAVED[name])
    # As published in bf16; both readers compute in fp32, so that their tokens can be compared.
    ours = DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32)
    theirs, info = reference.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert type(theirs.config) is Qwen3Config
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.eval()
    prompt, greedy, stop = prompt_and_answer(target)
    our_rounds, their_rounds, accepts = [], [], [0, 5, 2, 3, 5, 1]
    monkeypatch.setattr(ours, "forward", oracle_forward(ours, target, greedy, accepts, our_rounds))
    oracle = oracle_forward(theirs, target, greedy, accepts, their_rounds, states_of=lambda output: output)
    monkeypatch.setattr(theirs, "forward", oracle)
    options = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": stop}
    generated = target.generate(prompt, assistant_model=ours, speculation_type="dflash", **options)
    spoken = theirs.spec_generate(target, prompt, max_new_tokens=80, stop_token_ids=[stop])
    assert generated[0].tolist() == spoken[0].tolist() == greedy[: greedy.index(stop, 13) + 1]
    assert drafts(our_rounds, target) == drafts(their_rounds, target)
    assert len({token for tokens in drafts(our_rounds, target) for token in tokens}) > 2, "the drafts say something"
    anchors = [r["anchor"] for r in our_rounds]
    assert anchors == [r["anchor"] for r in their_rounds] and len({b - a for a, b in pairwise(anchors)}) >= 4
    for our, their in zip(our_rounds, their_rounds, strict=True):
        torch.testing.assert_close(our["hidden"], their["hidden"], rtol=0, atol=5e-5)


@pytest.mark.parametrize("make_target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("fields", [{}, {**MIX, "layer_types": QWEN36}], ids=["full", "qwen36_mix"])
@pytest.mark.parametrize("prompt_length", [2, 17])
def test_e6_generate_is_lossless_and_every_cached_draft_equals_the_uncached_one(
    monkeypatch, make_target, fields, prompt_length
):
    target = make_target(num_layers=8)
    drafter = tiny_drafter(target, seed=1, block_size=6, num_hidden_layers=5, num_taps=5, **fields).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    prompt = torch.randint(0, 256, (1, prompt_length), generator=torch.Generator().manual_seed(prompt_length))
    greedy = target.generate(prompt, max_new_tokens=48, do_sample=False)
    rounds = []
    oracle = oracle_forward(drafter, target, greedy[0].tolist(), [0, 5, 2, 3, 5, 1], rounds)
    monkeypatch.setattr(drafter, "forward", oracle)
    options = {"max_new_tokens": 48, "do_sample": False, "speculation_type": "dflash"}
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), greedy)
    monkeypatch.undo()
    committed = [r["context_hidden_states"].shape[1] for r in rounds[1:]]
    assert {1, 6} <= set(committed), committed
    context, head = [], target.get_output_embeddings()
    for r in rounds:
        context.append(r["context_hidden_states"])
        assert sum(c.shape[1] for c in context) == r["anchor"]
        with torch.no_grad():
            uncached = drafter(r["noise_embeds"], torch.cat(context, dim=1)).last_hidden_state
            assert_close(r["hidden"], uncached)
            assert torch.equal(head(r["hidden"]).argmax(-1), head(uncached).argmax(-1))


# Loading

# Names the files that a repository ships, and who wrote them: no reader computes with these.
NOT_READ = {"auto_map", "transformers_version"}


def read_json(folder):
    return json.loads((folder / "config.json").read_text())


def same_tensors(tensors, others):
    """Equal in names, dtypes, shapes and values."""
    same = tensors.keys() == others.keys()
    return same and all(t.dtype == others[n].dtype and torch.equal(t, others[n]) for n, t in tensors.items())


def drafter_of(config=QWEN3_8B):
    torch.manual_seed(0)
    return DFlashDraftModel(DFlashDraftConfig.from_dict(small(config)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_md6_a_published_folder_is_saved_as_it_was_read(tmp_path, name):
    config = small(PUBLISHED[name])
    source = write_folder(tmp_path / "published", config)
    DFlashDraftModel.from_pretrained(source).save_pretrained(tmp_path / "saved")
    saved = read_json(tmp_path / "saved")
    for field, value in config.items():
        if field == "dflash_config":
            assert value.items() <= saved[field].items()
        elif field == "torch_dtype":
            assert saved["dtype"] == value
        elif field not in NOT_READ:
            assert saved[field] == value, field
    files = [load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", source)]
    assert same_tensors(*files)
    DFlashDraftModel.from_pretrained(tmp_path / "saved").save_pretrained(tmp_path / "again")
    for path in (tmp_path / "saved").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.mark.parametrize(("config", "base"), [(QWEN36_27B, 10000000), (GPT_OSS_20B, 150000)], ids=["qwen", "gpt_oss"])
def test_md6_the_frequencies_of_a_bf16_folder_are_those_of_fp32(tmp_path, caplog, config, base):
    """Also of a drafter whose model type has scaled RoPE by default."""
    source = write_folder(tmp_path, small(config))
    expected = base ** -(torch.arange(0, 8, 2).float() / 8)
    loaded = [
        DFlashDraftModel.from_pretrained(source, **kwargs)
        for kwargs in ({}, {"dtype": torch.float32}, {"dtype": "bfloat16"}, {"device_map": "cpu"})
    ]
    drafter = drafter_of(config)
    for cast in (*loaded, drafter.to(torch.bfloat16), copy.deepcopy(drafter).float(), drafter.half()):
        assert cast.rotary_emb.inv_freq.dtype == torch.float32
        torch.testing.assert_close(cast.rotary_emb.inv_freq, expected)
    assert not caplog.records


def test_a_state_dict_and_a_configuration_of_the_users_own(tmp_path):
    drafter = drafter_of()
    loaded = DFlashDraftModel.from_pretrained(None, config=drafter.config, state_dict=drafter.state_dict())
    inputs = inputs_for(small(QWEN3_8B))
    assert torch.equal(loaded(**inputs).last_hidden_state, drafter.eval()(**inputs).last_hidden_state)
    state_dict = drafter.state_dict()
    state_dict["model.fc.weight"] = state_dict.pop("fc.weight")
    with refused(ValueError, "model.fc.weight"):
        DFlashDraftModel.from_pretrained(None, config=drafter.config, state_dict=state_dict)
    drafter.save_pretrained(tmp_path)
    other = DFlashDraftConfig.from_dict({**drafter.config.to_dict(), "rms_norm_eps": 1e-5})
    assert DFlashDraftModel.from_pretrained(tmp_path, config=other).config.rms_norm_eps == 1e-5
    with refused(ValueError, "fc.weight", [32, 160], [32, 96]):
        DFlashDraftModel.from_pretrained(tmp_path, target_layer_ids=[1, 2, 3])
    with refused(ValueError, "mask_token_id", 151645, "eos"):
        DFlashDraftModel.from_pretrained(tmp_path, mask_token_id=151645)


def test_overrides_and_the_loading_report(tmp_path):
    write_folder(tmp_path, small(QWEN36_27B))
    loaded, info = DFlashDraftModel.from_pretrained(
        tmp_path, attn_implementation="eager", is_causal=True, output_loading_info=True
    )
    assert loaded.config._attn_implementation == "eager"
    assert loaded.layers[4].self_attn.is_causal is True
    assert not info["missing_keys"]
    with refused(ValueError, "key_mapping"):
        DFlashDraftModel.from_pretrained(tmp_path, key_mapping={"^norm": "hidden_norm"})


# Saving


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16, torch.float16])
def test_t5_the_dtype_asked_for_is_written_and_the_drafter_left_alone(tmp_path, held, asked):
    drafter = drafter_of().to(held)
    before = copy.deepcopy(drafter.state_dict())
    drafter.save_pretrained(tmp_path, dtype=asked)
    written, saved = asked or held, load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {written}
    assert read_json(tmp_path)["dtype"] == str(written).removeprefix("torch.")
    assert drafter.dtype == held
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, before[name]) and torch.equal(saved[name], tensor.to(written))
    # Tensors are loaded as stored, whatever the configuration says.
    (tmp_path / "config.json").write_text(json.dumps({**read_json(tmp_path), "dtype": "float16"}))
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.dtype == loaded.config.dtype == written
    assert DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32
    # As a Trainer resumes: it loads the file into a drafter without a prefix, key by key.
    assert not any(drafter_of().load_state_dict(saved, False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "bfloat16"])
def test_no_other_dtype_is_written(tmp_path, dtype):
    with refused(ValueError, "dtype", repr(dtype)):
        drafter_of().save_pretrained(tmp_path, dtype=dtype)
    assert not list(tmp_path.iterdir())


def wrapped_layer():
    drafter = drafter_of()
    drafter.layers[1] = torch.compile(drafter.layers[1])
    return drafter, None


WRAPPED = {
    "compiled": lambda: (torch.compile(drafter_of()), None),
    "compiled_as_the_trainer_saves_it": lambda: (drafter_of(), torch.compile(drafter_of()).state_dict()),
    "data_parallel": lambda: (drafter_of(), torch.nn.DataParallel(drafter_of()).state_dict()),
    "compiled_layer": wrapped_layer,
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapper_leaves_no_prefix(tmp_path, wrap):
    drafter, state_dict = wrap()
    names = drafter.state_dict() if state_dict is None else state_dict
    assert any("_orig_mod." in name or name.startswith("module.") for name in names)
    drafter.save_pretrained(tmp_path, state_dict=state_dict)
    assert same_tensors(load_file(tmp_path / "model.safetensors"), drafter_of().state_dict())


def test_nothing_but_the_expected_tensors_is_saved(tmp_path):
    drafter = drafter_of()
    state_dict = drafter.state_dict()
    del state_dict["norm.weight"]
    with refused(ValueError, "norm.weight"):
        drafter.save_pretrained(tmp_path, state_dict=state_dict)
    drafter.extra = torch.nn.Linear(2, 2)
    with refused(ValueError, "extra.weight"):
        drafter.save_pretrained(tmp_path)
    del drafter.extra
    drafter.norm.to(torch.bfloat16)
    with refused(ValueError, "dtypes", "norm.weight"):
        drafter.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    drafter.save_pretrained(tmp_path, dtype=torch.bfloat16)
    drafter.config.mask_token_id = 10**6
    with refused(ValueError, "mask_token_id", 10**6):
        drafter.save_pretrained(tmp_path / "other", dtype=torch.bfloat16)


def test_shards_are_read_back_and_their_index_does_not_outlive_them(tmp_path):
    drafter = drafter_of()
    drafter.save_pretrained(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2 and index.exists()
    for _ in range(2):
        assert same_tensors(DFlashDraftModel.from_pretrained(tmp_path).state_dict(), drafter.state_dict())
        drafter.save_pretrained(tmp_path)
    assert not index.exists()


@pytest.mark.parametrize(
    ("kwargs", "dtype"), [({}, "bfloat16"), ({"dtype": torch.float16}, "float16"), ({"dtype": None}, "float32")]
)
def test_c2_pushing_uploads_one_finished_folder_in_bf16_by_default(tmp_path, monkeypatch, kwargs, dtype):
    drafter, files = drafter_of(), {}
    monkeypatch.setattr(
        "dflash_hf.publishing.publish",
        lambda publication, **kwargs: files.update({p.name: p.read_bytes() for p in publication.folder.iterdir()}),
    )
    drafter.push_to_hub("me/drafter", **kwargs)
    assert json.loads(files["config.json"])["dtype"] == dtype
    assert {str(tensor.dtype) for tensor in load(files["model.safetensors"]).values()} == {f"torch.{dtype}"}
    assert {"modeling_dflash.py", "configuration_dflash.py"} <= files.keys()
    assert drafter.dtype == torch.float32


def test_c2_saving_with_a_push_uploads_what_was_written(tmp_path, monkeypatch):
    commits = []

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return type("Repo", (), {"repo_id": repo_id})

        def create_commit(self, repo_id, operations, **kwargs):
            commits.append({o.path_in_repo: Path(o.path_or_fileobj).read_bytes() for o in operations})

    card = type("Card", (), {"save": lambda self, path: Path(path).write_text("card")})
    for module in ("transformers.utils.hub", "transformers.modeling_utils"):
        monkeypatch.setattr(f"{module}.hf_api", Api)
        monkeypatch.setattr(f"{module}.create_and_tag_model_card", lambda *args, **kwargs: card())
    drafter_of().save_pretrained(tmp_path, dtype=torch.bfloat16, push_to_hub=True, repo_id="me/drafter")
    (files,) = commits
    assert json.loads(files["config.json"])["dtype"] == "bfloat16"
    assert files["model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()
