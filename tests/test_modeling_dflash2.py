# SPDX-License-Identifier: Apache-2.0
"""DFlash 2: training equals decoding, a naive twin and z-lab's reference; its start is a DFlash drafter."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from naive import _attention, packed_forward, random_drafter, random_inputs, rms_norm
from reference import reference_drafter, reference_module
from safetensors.torch import load_file, save_file
from test_modeling_dflash import FULL, QWEN36, ROWS, SLIDING, assert_close, cached_round, new_cache
from tiny import refused
from transformers import AutoModel, DynamicCache

from dflash_hf import DFlash2DraftModel, DFlashDraftModel, validate_checkpoint


SMALL = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
DRAFTERS = {
    "full": {"layer_types": [FULL, FULL]},
    "sliding": {"layer_types": [SLIDING, SLIDING], "window": 7},
    "mixed": {"layer_types": QWEN36, "window": 6},
    "causal": {"layer_types": [SLIDING, FULL], "window": 6, "is_causal": True},
    "bidirectional": {"layer_types": [SLIDING, FULL], "window": 6, "is_causal": False},
}


def random_dflash2(seed: int = 0, own: dict | None = None, **fields) -> DFlash2DraftModel:
    """A drafter of which every new weight matters."""
    drafter = DFlash2DraftModel.from_dflash(random_drafter(**fields), **{**SMALL, **(own or {})})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "_conv." in name or name.startswith("candidate_selector."):
                parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return drafter


def naive_conv(conv, x, side, z):
    """One side of a convolution around a sublayer with the input x, applied to z, both [b, D]; slot by slot."""
    taps, size = conv.base_kernel.shape[1], x.shape[1] // conv.num_groups
    slots = []
    for t in range(len(z)):
        delta = (conv.kernel_projection.weight @ x[t]).view(2, taps, conv.num_groups)[side]
        parts = [
            (conv.base_kernel[side, i] + delta[i].repeat_interleave(size)) * z[t - i] for i in range(taps) if i <= t
        ]
        slots.append(sum(parts))
    return torch.stack(slots)


def naive_dflash2(model, taps, noise_embeds, anchor):
    """As naive.naive_drafter."""
    config, eps = model.config, model.config.rms_norm_eps
    context = rms_norm(taps[:anchor] @ model.fc.weight.T, model.hidden_norm, eps)
    hidden = noise_embeds
    for layer, layer_type in zip(model.layers, config.layer_types, strict=True):
        causal = layer_type == SLIDING if config.is_causal is None else config.is_causal
        window = config.sliding_window if layer_type == SLIDING else None
        x = rms_norm(hidden, layer.input_layernorm, eps)
        prepared = naive_conv(layer.attention_conv, x, 0, x)
        attended = _attention(layer.self_attn, config, prepared, context, causal, window)
        hidden = hidden + naive_conv(layer.attention_conv, x, 1, attended)
        x = rms_norm(hidden, layer.post_attention_layernorm, eps)
        prepared = naive_conv(layer.mlp_conv, x, 0, x)
        gate, up = prepared @ layer.mlp.gate_proj.weight.T, prepared @ layer.mlp.up_proj.weight.T
        hidden = hidden + naive_conv(
            layer.mlp_conv, x, 1, (gate * torch.sigmoid(gate) * up) @ layer.mlp.down_proj.weight.T
        )
    return rms_norm(hidden, model.norm, eps)


@pytest.mark.parametrize("fields", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("twin", ["cached_block", "naive"])
def test_golden_packed_training_equals_one_block_at_a_time(fields, twin):
    rows = ROWS["two_rows_padded"]
    drafter = random_dflash2(**fields)
    block_size = drafter.config.block_size
    noise, context = random_inputs(drafter, rows)
    weights = [p for name, p in drafter.named_parameters() if not name.startswith("candidate_selector.")]
    inputs = [*weights, noise.requires_grad_(), context.requires_grad_()]
    packed = packed_forward(drafter, rows, noise, context)
    cotangent = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
    packed_loss, single_loss = 0.0, 0.0
    for row, index, start, anchor in rows.blocks:
        slots = slice(index * block_size, (index + 1) * block_size)
        if twin == "naive":
            single = naive_dflash2(drafter, context[row, start:], noise[row, slots], anchor)
        else:
            taps = context[row : row + 1, start : start + anchor]
            single = cached_round(drafter, new_cache(drafter), noise[row : row + 1, slots], taps, 0)[0]
        assert_close(packed[row, slots], single)
        packed_loss = packed_loss + (packed[row, slots] * cotangent[row, slots]).sum()
        single_loss = single_loss + (single * cotangent[row, slots]).sum()
    pairs = zip(torch.autograd.grad(packed_loss, inputs), torch.autograd.grad(single_loss, inputs), strict=True)
    for actual, expected in pairs:
        assert expected.abs().max() > 0
        assert_close(actual, expected)


@pytest.fixture(scope="module")
def zlab():
    return reference_module()


@pytest.mark.parametrize("fields", DRAFTERS.values(), ids=DRAFTERS)
def test_forward_and_greedy_walk_equal_z_labs(fields, zlab):
    """One block, plain and through a cache that grows by some context rows each time."""
    torch.manual_seed(0)
    drafter = random_dflash2(**fields)
    theirs = reference_drafter(zlab, drafter)
    context, head = torch.randn(1, 20, drafter.fc.in_features), 0.005 * torch.randn(50, 32)
    ours_cache, their_cache, done = new_cache(drafter), DynamicCache(config=theirs.config), 0
    their_cache.activate_past_recording()
    num_changed = 0
    with torch.no_grad():
        for anchor in (3, 4, 11, 20):
            noise = torch.randn(1, 4, 32)
            hidden = cached_round(drafter, ours_cache, noise, context[:, done:anchor], done)
            places = torch.arange(done, anchor + 4)[None]
            given = {"target_hidden": context[:, done:anchor], "noise_embedding": noise, "position_ids": places}
            expected = theirs(**given, past_key_values=their_cache, use_cache=True)
            their_cache.crop(-4)
            done = anchor
            plain = drafter(noise, context[:, :anchor]).last_hidden_state
            for ours in (hidden, plain):
                torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
            logits, start = hidden[:, 1:] @ head.T, torch.tensor([anchor])
            tokens, _ = drafter.candidate_selector.walk(hidden[:, 1:], logits, start)
            assert torch.equal(tokens, theirs.propose(expected[:, 1:], start, lambda h: h @ head.T, 0.0)[0])
            num_changed += int((tokens != logits.argmax(-1)).sum())
    assert num_changed > 0


def naive_scores(selector, state, logits, candidates, predecessor):
    """[K] scores of one slot after one token."""
    query = selector.hidden_projection.weight @ state
    left = selector.predecessor_codebook[predecessor] * query
    return torch.stack([logits[j] + torch.dot(left, selector.successor_codebook[j]) for j in candidates])


def test_the_walk_follows_the_scores_and_its_distribution_is_that_of_the_candidates():
    selector = random_dflash2(layer_types=[FULL]).candidate_selector
    states, logits = torch.randn(3, 5, 32), torch.randn(3, 5, 50)
    anchors = torch.tensor([7, 0, 49])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        greedy, none = selector.walk(states, logits, anchors)
        drawn, probabilities = selector.walk(states, logits, anchors, 0.7, generator)
        assert none is None
        for row in range(3):
            before = [anchors[row].item(), anchors[row].item()]
            for slot in range(5):
                top = sorted(logits[row, slot].topk(4).indices.tolist())
                scores = [naive_scores(selector, states[row, slot], logits[row, slot], top, p) for p in before]
                assert greedy[row, slot] == top[scores[0].argmax()]
                expected = torch.zeros(50).scatter(0, torch.tensor(top), (scores[1] / 0.7).softmax(0))
                torch.testing.assert_close(probabilities[row, slot], expected)
                before = [greedy[row, slot].item(), drawn[row, slot].item()]
        # What is drawn follows it.
        many, sparse = selector.walk(*(t[:1].expand(4000, *t.shape[1:]) for t in (states, logits, anchors)), 0.7)
    shares = torch.bincount(many[:, 0], minlength=50) / 4000
    torch.testing.assert_close(shares, sparse[0, 0], rtol=0, atol=0.04)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "own", [{}, {"conv_kernel_size": 0}, {"selector_rank": 0}], ids=["both", "selector", "convolution"]
)
def test_identity_start_is_the_dflash_drafter_to_the_bit(dtype, own):
    rows = ROWS["three_documents"]
    drafter = random_drafter(layer_types=QWEN36, window=6).to(dtype)
    noise, context = (t.to(dtype) for t in random_inputs(drafter, rows))
    before = copy.deepcopy(drafter.state_dict())
    grown = DFlash2DraftModel.from_dflash(drafter, **{**SMALL, **own})
    with torch.no_grad():
        hidden = packed_forward(grown, rows, noise, context)
        assert torch.equal(hidden, packed_forward(drafter, rows, noise, context))
        if grown.candidate_selector is not None:
            # Many equal logits, of which both take the first.
            logits = (hidden[:, 1:4] @ torch.randn(50, 32, dtype=dtype).T).round()
            tokens, _ = grown.candidate_selector.walk(hidden[:, 1:4], logits, torch.tensor([3]))
            assert torch.equal(tokens, logits.argmax(-1))
    assert grown.dtype == dtype and all(torch.equal(before[name], t) for name, t in drafter.state_dict().items())


# Loading and saving


@pytest.fixture
def folder(tmp_path):
    """A drafter of five layers as it is published, in bf16."""
    drafter = random_dflash2(layer_types=QWEN36, window=6).bfloat16()
    drafter.save_pretrained(tmp_path)
    return tmp_path, drafter


def test_the_published_layout_is_written_and_read(folder):
    path, drafter = folder
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    assert len(tensors) == 81 and config["architectures"] == ["DFlash2DraftModel"] and config["model_type"] == "qwen3"
    sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
    assert sizes.items() <= config["dflash_config"].items() and not sizes.keys() & config.keys()
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert shapes["candidate_selector.successor_codebook"] == (50, 6)
    assert shapes["layers.4.mlp_conv.base_kernel"] == (2, 2, 32)
    assert shapes["layers.0.attention_conv.kernel_projection.weight"] == (16, 32)
    for cls in (DFlash2DraftModel, DFlashDraftModel, AutoModel):
        loaded = cls.from_pretrained(path)
        assert type(loaded) is DFlash2DraftModel and loaded.dtype == torch.bfloat16
        assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in drafter.state_dict().items())
        assert loaded.config.dflash_config == drafter.config.dflash_config


def test_remote_code_loads_it_where_the_package_is_missing(folder, tmp_path):
    path, drafter = folder
    names = {file.name for file in path.glob("*.py")}
    assert {"modeling_dflash2.py", "configuration_dflash2.py", "modeling_dflash.py"} <= names
    script = (
        "import sys, torch; sys.modules['dflash_hf'] = None\n"
        "from transformers import AutoModel\n"
        f"model = AutoModel.from_pretrained({str(path)!r}, trust_remote_code=True)\n"
        "codebook = model.candidate_selector.successor_codebook\n"
        "print(type(model).__name__, model.config.selector_rank, codebook.sum().item())"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    output = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd="/")
    total = drafter.candidate_selector.successor_codebook.sum().item()
    assert output.stdout.split() == ["DFlash2DraftModel", "6", str(total)], output.stderr


def test_a_part_is_saved_under_a_name_that_no_server_has(tmp_path):
    part = random_dflash2(own={"selector_rank": 0}, layer_types=[FULL])
    part.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert part.candidate_selector is None and config["architectures"] == ["DFlash2PartDraftModel"]
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert type(loaded) is DFlash2DraftModel and loaded.candidate_selector is None
    report = validate_checkpoint(tmp_path)
    assert [report.ok_for(reader) for reader in ("vLLM", "SGLang", "z-lab", "transformers")] == [False] * 3 + [True]


def test_each_kind_of_drafter_says_which_it_is(folder, tmp_path):
    random_drafter(layer_types=[FULL]).save_pretrained(tmp_path / "plain")
    with refused(ValueError, "from_dflash"):
        DFlash2DraftModel.from_pretrained(tmp_path / "plain")
    with refused(ValueError, "DFlash 2"):
        DFlash2DraftModel.from_dflash(folder[0])
    assert type(DFlash2DraftModel.from_dflash(tmp_path / "plain", **SMALL)) is DFlash2DraftModel


def status_of(path, rule):
    """Readers for which a rule is an error, and for which a warning."""
    report = validate_checkpoint(path)
    return tuple(
        [r for r in ("vLLM", "SGLang", "z-lab", "transformers") if report.status(rule, r) == kind]
        for kind in ("error", "warning")
    )


@pytest.mark.parametrize(
    ("changes", "rule", "errors"),
    [
        ({"selector_top_k": None}, "dflash2", 4),
        ({"conv_group_size": 7}, "dflash2", 4),
        ({"conv_kernel_size": 5}, "dflash2", 4),
        ({"selector_top_k": 51}, "dflash2", 4),
        ({"selector_rank": 0}, "dflash2", 4),
        ({"draft_vocab_size": 30}, "dflash2_fields", 4),
        ({"input_embedding_scale": 2.0}, "partly_read", 1),
        ({"output_multiplier": 0.5, "final_logit_softcapping": 20}, "partly_read", 0),
    ],
)
def test_fields_that_do_not_go_together_are_found(folder, changes, rule, errors):
    path, _ = folder
    config = json.loads((path / "config.json").read_text())
    config["dflash_config"] = {k: v for k, v in {**config["dflash_config"], **changes}.items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))
    assert len(status_of(path, rule)[0]) == errors
    if errors == 4:
        with refused(ValueError, *changes):
            DFlashDraftModel.from_pretrained(path)


def test_names_and_values_that_servers_misread_are_found(folder):
    path, _ = folder
    assert validate_checkpoint(path).ok
    tensors, file = load_file(path / "model.safetensors"), path / "model.safetensors"
    assert status_of(path, "architectures") == ([], ["transformers"])
    name = "candidate_selector.successor_codebook"
    save_file({**tensors, name: torch.zeros_like(tensors[name])}, file, metadata={"format": "pt"})
    assert status_of(path, "dead_selector")[1] == ["vLLM", "SGLang", "z-lab", "transformers"]
    codebook = tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})
    assert status_of(path, "tensors_missing")[0] == ["vLLM", "SGLang", "z-lab", "transformers"]
    save_file({**tensors, f"{name}.weight": codebook}, file, metadata={"format": "pt"})
    assert status_of(path, "codebook_names") == (["vLLM", "SGLang", "transformers"], [])
    assert status_of(path, "tensors_missing") == status_of(path, "tensors_unexpected") == ([], [])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["DFlashDraftModel"]}))
    assert status_of(path, "layout") == (["vLLM", "SGLang", "transformers"], ["z-lab"])
