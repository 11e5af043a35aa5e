# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tokenising runs at a tiny size and writes its numbers."""

import json
import subprocess
import sys
from pathlib import Path

from tiny import byte_tokenizer


RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "benchmark_tokenize.py"


def test_the_benchmark_prints_and_writes_its_numbers(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "target")
    words = f"--target {tmp_path / 'target'} --megabytes 1 --files 2 --rounds 1 --json {tmp_path / 'numbers.json'}"
    done = subprocess.run([sys.executable, RECIPE, *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "numbers.json").read_text())
    assert written["rounds"][0]["tokenize_files"] > 1000 and 2**26 < written["peak_memory_bytes"] < 2**33
    assert f"ratio to encode_batch {written['ratio']:.2f} (median of 1)" in done.stdout
