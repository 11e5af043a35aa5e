# SPDX-License-Identifier: Apache-2.0
"""The study of adapters runs through on a tiny target; its prompts are split by what they ask for."""

import gzip
import json
import runpy
import sys
from pathlib import Path

import pytest
from tiny import MASK_TOKEN_ID, byte_tokenizer, llama_target


FOLDER = Path(__file__).parents[1] / "recipes" / "smollm2-135m"


def test_no_tested_condition_is_trained_on():
    code_prompts = runpy.run_path(str(FOLDER / "code_prompts.py"))["code_prompts"]
    prompts = {split: code_prompts(split) for split in ("train", "validation", "test")}
    assert {split: len(texts) for split, texts in prompts.items()} == {"train": 152, "validation": 38, "test": 38}
    assert len({text for texts in prompts.values() for text in texts}) == 228
    assert not any("repeated" in t or "in the list more than once" in t for t in prompts["train"])
    program = prompts["test"][0].split("```python\n")[1].split("```")[0]
    compile(program, "prompt", "exec")


def test_the_study_runs_through(tmp_path, monkeypatch, capsys):
    target = llama_target()
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    for name, count in (("general", 10), ("dev", 3)):
        rows = [
            {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"It is {i}."}]}
            for i in range(count)
        ]
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    options = (
        f"--target {tmp_path}/target --general {tmp_path}/general.jsonl.gz --general_eval {tmp_path}/dev.jsonl.gz "
        f"--output_dir {tmp_path}/out --num_general 8 --replay 2 --num_prompts 2 --max_new_tokens 8 --num_layers 2 "
        f"--num_taps 2 --block_size 4 --mask_token_id {MASK_TOKEN_ID} --base_epochs 1 --epochs 1 --lora_rank 2 "
        "--row_length 512 --rows_per_step 2 --bf16 false --lora_rates 1e-3 --whole_rates 1e-3"
    )
    monkeypatch.setattr(sys, "argv", ["adaptation.py", *options.split()])
    monkeypatch.syspath_prepend(FOLDER)
    runpy.run_path(str(FOLDER / "adaptation.py"), run_name="__main__")
    results = json.loads((tmp_path / "out" / "adaptation.json").read_text())
    assert results["adapter"][0]["trained_parameters"] < results["whole"][0]["trained_parameters"]
    for run in (results["general"], *results["adapter"], *results["whole"]):
        assert run["acceptance_length"].keys() == {"general", "code_validation", "code_test"}
        assert all(1 <= length <= 4 for length in run["acceptance_length"].values()) and run["seconds"] > 0
    assert results["summary"]["adapter"]["learning_rate"] == pytest.approx(1e-3)
    assert "of the whole drafter's gain on code" in capsys.readouterr().out
