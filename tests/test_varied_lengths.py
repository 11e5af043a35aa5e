# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention plans anew for every shape, so decoding and packed documents leave it out."""

import threading

import pytest
import torch
from runs import make_documents, make_trainer
from tiny import MASK_TOKEN_ID, dense_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, FrozenTarget
from dflash_hf.acceptance import DecodingSettings, plain_answers
from dflash_hf.frozen_target import varied_lengths
from dflash_hf.generation import speculative_generate


@pytest.fixture(autouse=True)
def switch():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def watched(monkeypatch) -> list[bool]:
    """Whether cuDNN was allowed, for each call of attention."""
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def attention(*args, **kwargs):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    return seen


@pytest.mark.parametrize("before", [True, False])
def test_decoding_leaves_cudnn_out_and_gives_it_back(monkeypatch, before):
    torch.backends.cuda.enable_cudnn_sdp(before)
    target = dense_target()
    fields = {"num_taps": 2, "num_hidden_layers": 1, "block_size": 4, "mask_token_id": MASK_TOKEN_ID}
    drafter = DFlashDraftModel(DFlashDraftConfig.from_target_config(target.config, **fields))
    seen = watched(monkeypatch)
    prompt = torch.arange(1, 8)[None]
    speculative_generate(target, drafter, prompt, max_new_tokens=6)
    speculative_generate(target, drafter, prompt, max_new_tokens=6, use_cache=False)
    plain_answers(target, [prompt], DecodingSettings(4), progress=False)
    FrozenTarget(target, [1]).context_hidden_states(prompt)
    assert seen and not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled() is before


def test_threads_that_work_at_the_same_time_share_it():
    first, second = varied_lengths(), varied_lengths()
    torch.backends.cuda.enable_cudnn_sdp(True)
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_errors_give_it_back():
    torch.backends.cuda.enable_cudnn_sdp(True)
    with pytest.raises(RuntimeError, match="mine"), varied_lengths():
        raise RuntimeError("mine")
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("depth", [0, 2])
def test_g2_a_trainer_leaves_cudnn_out_all_along(monkeypatch, tmp_path, depth):
    """The switch is the whole process's: the target's thread must not choose the drafter's kernels now and then."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    trainer = make_trainer(tmp_path, dense_target(), prefetch_depth=depth, max_steps=3, eval_dataset=make_documents(2))
    seen = watched(monkeypatch)
    trainer.train()
    trainer.evaluate()
    assert len(seen) > 3 and not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled()
