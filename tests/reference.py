# SPDX-License-Identifier: Apache-2.0
"""The published reference implementation (tests/reference.txt), for tests that compare with it."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import pytest
from transformers import Qwen3Config


SLIDING = "sliding_attention"
REQUIREMENT = next(
    line for line in Path(__file__).with_name("reference.txt").read_text().splitlines() if line.startswith("dflash==")
)


def reference_module() -> ModuleType:
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


def reference_drafter(reference, drafter):
    """The reference's model with the same weights, configured in the published spelling and by nothing of ours."""
    ours = drafter.config
    config = Qwen3Config(
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_hidden_layers,
        num_attention_heads=ours.num_attention_heads,
        num_key_value_heads=ours.num_key_value_heads,
        head_dim=ours.head_dim,
        vocab_size=ours.vocab_size,
        rms_norm_eps=ours.rms_norm_eps,
        attention_bias=ours.attention_bias,
        layer_types=list(ours.layer_types),
        use_sliding_window=SLIDING in ours.layer_types,
        sliding_window=ours.sliding_window,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_parameters["rope_theta"]},
        num_target_layers=ours.num_target_layers,
        block_size=ours.block_size,
        dflash_config=ours.dflash_config,
        is_causal=ours.is_causal,
    )
    # The class of the same name; its codebooks are embeddings.
    model = getattr(reference, ours.to_dict()["architectures"][0])(config).eval()
    weights = {name + ".weight" * name.endswith("codebook"): t for name, t in drafter.state_dict().items()}
    model.load_state_dict(weights, strict=True)
    return model
