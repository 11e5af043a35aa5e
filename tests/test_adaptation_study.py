# SPDX-License-Identifier: Apache-2.0
"""The study of adapters runs through on a tiny target; its prompts are split by what they ask for."""

import gzip
import json
import runpy
import sys
from pathlib import Path

import pytest
from tiny import MASK_TOKEN_ID, byte_tokenizer, llama_target
from transformers import TrainerControl


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
        f"--num_taps 2 --block_size 4 --mask_token_id {MASK_TOKEN_ID} --base_epochs 1 --epochs 13 --lora_rank 2 "
        "--row_length 512 --rows_per_step 2 --bf16 false --lora_rates 1e-3 1e30 --whole_rates 1e-3"
    )
    monkeypatch.setattr(sys, "argv", ["adaptation.py", *options.split()])
    monkeypatch.syspath_prepend(FOLDER)
    runpy.run_path(str(FOLDER / "adaptation.py"), run_name="__main__")
    results = json.loads((tmp_path / "out" / "adaptation.json").read_text())
    assert results["adapter"][0]["trained_parameters"] < results["whole"][0]["trained_parameters"]
    # A rate at which training diverges costs its own figures only.
    assert "not finite" in results["adapter"][1]["error"] and len(results["adapter"]) == 2
    for run in (results["general"], results["adapter"][0], *results["whole"]):
        assert run["acceptance_length"].keys() == {"general", "code_validation", "code_test"}
        assert all(1 <= length <= 4 for length in run["acceptance_length"].values()) and run["seconds"] > 0
    assert results["summary"]["adapter"]["learning_rate"] == pytest.approx(1e-3)
    assert "of the whole drafter's gain on code" in capsys.readouterr().out
    # Another call adapts the same drafter.
    again = f"{options} --general_drafter {tmp_path}/out/general --output_dir {tmp_path}/again --lora_rates 1e-3"
    monkeypatch.setattr(sys, "argv", ["adaptation.py", *again.split()])
    runpy.run_path(str(FOLDER / "adaptation.py"), run_name="__main__")
    repeated = json.loads((tmp_path / "again" / "adaptation.json").read_text())
    assert repeated["general"]["acceptance_length"] == results["general"]["acceptance_length"]
    assert repeated["adapter"][0]["acceptance_length"] == results["adapter"][0]["acceptance_length"]


def test_the_first_drafter_is_done_after_its_time(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    study = runpy.run_path(str(FOLDER / "adaptation.py"))
    control = TrainerControl()
    for seconds, stops in ((100.0, False), (-1.0, True)):
        callback = study["StopAfter"](seconds)
        callback.on_train_begin(None, None, control)
        callback.on_step_end(None, None, control)
        assert control.should_training_stop is stops


def test_a_kind_without_a_drafter_is_not_compared(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    summarise = runpy.run_path(str(FOLDER / "adaptation.py"))["summarise"]

    def run(rate, validation, test, general):
        lengths = {"code_validation": validation, "code_test": test, "general": general}
        return {"learning_rate": rate, "acceptance_length": lengths}

    results = {"general": run(1e-3, 2.0, 2.0, 2.0), "adapter": [{"learning_rate": 1.0, "error": "not finite"}]}
    results["whole"] = [run(1e-4, 2.5, 2.75, 2.0), run(3e-4, 3.0, 3.0, 1.9)]
    assert summarise(results) == {}
    results["adapter"].append(run(1e-3, 2.8, 2.9, 1.99))
    summary = summarise(results)
    assert summary["share_of_gain"] == pytest.approx(0.9) and summary["whole"]["learning_rate"] == 3e-4
    assert summary["adapter"]["change_on_general"] == pytest.approx(-0.005)
    results["whole"] = [run(1e-4, 2.0, 2.0, 2.0)]
    assert summarise(results)["share_of_gain"] is None
