# SPDX-License-Identifier: Apache-2.0
"""Decoding and the walk on a CUDA device: the fast kernels of hybrid targets roll back too."""

import pytest
import tiny
import torch
from test_generation import PROMPT, drafter_for, oracle_for
from test_walk import trained_like

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.acceptance import DecodingSettings, measure_acceptance, plain_answers, walked_acceptance_length
from dflash_hf.generation import speculative_generate


pytestmark = pytest.mark.gpu

TARGETS = {"dense": tiny.dense_target, "tied_llama": tiny.llama_target, "hybrid": tiny.hybrid_target}
# Logits that are nearer than this may change places with the order of summation, which differs between a verification
# and a single token; recurrent kernels multiply fp32 in TF32. A wrong state moves logits by about 1.
NEARLY_EQUAL = {torch.float32: 5e-3, torch.bfloat16: 0.1}
# The recurrent kernels take heads of no less than this.
HEADS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}


def make_target(name):
    return TARGETS[name](**(HEADS if name == "hybrid" else {}))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e1_answers_are_the_targets_own_up_to_ties(name, dtype):
    target = make_target(name).to("cuda", dtype)
    settings = DecodingSettings(40)
    plain = plain_answers(target, [PROMPT, [7]], settings, progress=False)
    sequence = PROMPT + plain[0].output_ids
    oracle = oracle_for(target, sequence, lambda n: [n % 4 > 0, n % 3 > 0, True]).to("cuda", dtype)
    for drafter in (oracle, drafter_for(target).to("cuda", dtype)):
        report = measure_acceptance(target, drafter, [PROMPT, [7]], progress=False, settings=settings, plain=plain)
        for prompt in report.prompts:
            assert prompt.lossless or prompt.top2_gap <= NEARLY_EQUAL[dtype], (
                prompt.first_difference,
                prompt.top2_gap,
            )
    if dtype == torch.float32:
        assert measure_acceptance(target, oracle, [PROMPT], 12, progress=False).acceptance_length > 1.5


@pytest.mark.parametrize("name", TARGETS)
def test_e5_walk_and_decoding_agree(name):
    # Where flash-linear-attention is installed, a hybrid target runs on a GPU only.
    target = make_target(name).cuda()
    answer = target.generate(torch.tensor([PROMPT]).cuda(), max_new_tokens=40, do_sample=False)[0].tolist()
    documents = [{"input_ids": answer, "supervised_spans": [[len(PROMPT), len(answer)]]}]
    drafter = trained_like(target, documents, device="cuda")
    report = measure_acceptance(target, drafter, [PROMPT], 40, check_lossless=False, progress=False)
    assert report.acceptance_length > 1.3
    walked = walked_acceptance_length(target, drafter, report, progress=False)
    assert walked == pytest.approx(report.acceptance_length, rel=0.1)


def test_sampling_draws_on_the_device():
    target = tiny.dense_target().cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    output = speculative_generate(
        target, drafter_for(target).cuda(), torch.tensor([PROMPT]), 12, temperature=2.0, top_p=0.9, generator=generator
    )
    assert output.sequences.shape == (1, len(PROMPT) + 12) and output.sequences.device.type == "cuda"


def test_evaluation_walks_with_compiled_layers(tmp_path):
    """The walk's blocks come in the shapes that the layers are compiled for."""
    documents = [{"input_ids": list(range(60)), "supervised_spans": [[5, 60]]} for _ in range(6)]
    target = tiny.dense_target()
    drafter = drafter_for(target, block_size=16, layer_types=["full_attention"], window=None)
    arguments = DFlashTrainingArguments(
        output_dir=str(tmp_path), row_length=128, num_anchors=16, max_steps=2, report_to="none", save_strategy="no"
    )
    trainer = DFlashTrainer(drafter, target, arguments, train_dataset=documents, eval_dataset=documents)
    trainer.train()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_acceptance_length"] == second["eval_acceptance_length"] >= 1
