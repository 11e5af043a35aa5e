# SPDX-License-Identifier: Apache-2.0
"""Files of JSON that are not what is read: each message says what there is and which command mends it."""

import json
import os

import pytest

from dflash_hf.prompts import read_prompts
from dflash_hf.tokenizing import SOURCE_KEY, read_completions


ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LINE, PRETTY = json.dumps(ROW), json.dumps(ROW, indent=2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", f"{PRETTY}\n{PRETTY}", r":1: .*one whole object per line, which `jq -c \. FILE` writes"),
        ("a.jsonl", f"{PRETTY}\n{PRETTY}", r":1: .*`jq -c \. FILE`"),
        ("a.jsonl", f"{LINE}{LINE}", r":1: .*Extra data.*`jq -c \. FILE`"),
        ("a.jsonl", f"{LINE}\r{LINE}\r", r":1: .*`jq -c \. FILE`"),
        ("a.jsonl", f"[{LINE},{LINE}]", r":1: expected a JSON object, got list .*`jq -c '\.\[\]' FILE`"),
        ("a.jsonl", f"[\n{LINE},\n{LINE}\n]", r":1: .*`jq -c '\.\[\]' FILE`"),
        ("a.json", f"[{LINE}]\n[{LINE}]", r":1: the file is no JSON list .*`jq -c '\.\[\]' FILE`"),
        ("a.json", f'[{LINE[:-1]}, "x": {"9" * 5000}}}]', ":1: the file is no JSON list .*digits"),
        ("a.json", "[" * 10**5, ":1: the file is no JSON list, nested too deeply"),
    ],
)
def test_rows_of_another_shape_name_the_command_that_writes_them_as_lines(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_completions(tmp_path / name)


def test_a_broken_list_is_not_taken_for_lines(tmp_path):
    (tmp_path / "a.json").write_text(f"[{LINE},{LINE}"[:-10])
    with pytest.raises(ValueError, match=r"a\.json:1: the file is no JSON list \(Unterminated") as caught:
        read_completions(tmp_path / "a.json")
    assert "jq" not in str(caught.value)


def test_a_folder_with_the_name_of_a_file_is_a_folder(tmp_path):
    folder = tmp_path / "a.json"
    (folder / "b.jsonl").mkdir(parents=True)
    for name in ("settings.json", "c.jsonl"):
        (folder / name).write_text(LINE)
    (row,) = read_completions(folder)
    assert row[SOURCE_KEY] == f"{folder}/c.jsonl:1"
    assert len(read_completions(f"{folder}/*.jsonl")) == 1
    with pytest.raises(FileNotFoundError, match="No such file or folder"):
        read_completions(f"{tmp_path}/*.json")


def test_a_folder_may_hold_links_and_pipes_are_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINE)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    os.mkfifo(tmp_path / "in" / "c.jsonl")
    (row,) = read_completions(tmp_path / "in")
    assert row[SOURCE_KEY] == f"{tmp_path}/in/b.jsonl:1"
    with pytest.raises(FileNotFoundError, match="Pipes and devices are passed over"):
        read_completions(tmp_path / "in" / "c.jsonl")


def test_a_field_of_any_name_is_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a", "_source": "mine"}))
    assert read_completions(path) == [{"prompt": "a", "_source": "mine", SOURCE_KEY: f"{path}:1"}]
    (prompt,) = read_prompts(path)
    assert prompt.messages == [{"role": "user", "content": "a"}] and prompt.source == "a"
