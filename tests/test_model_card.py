# SPDX-License-Identifier: Apache-2.0
"""Cards: metadata that the Hub takes, commands that match the configuration, nothing that is not known."""

import inspect
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset, concatenate_datasets
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results
from tiny import MASK_TOKEN_ID, byte_tokenizer, llama_target

from dflash_hf import (
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainingArguments,
    PackedDataset,
    TokenizeOptions,
    tokenize_files,
)
from dflash_hf.documents import open_documents
from dflash_hf.model_card import (
    RECIPE_ARGUMENTS,
    CardOptions,
    _data,
    _supervised_tokens,
    differing_arguments,
    hub_id,
    model_card,
    python_example,
    read_facts,
    read_results,
)
from dflash_hf.validation import Checkpoint, read_folder, serving_commands


ROOT = Path(__file__).parents[1]
RECIPES = runpy.run_path(str(ROOT / "recipes" / "model_cards.py"))
CARDS = sorted((ROOT / "model_cards").glob("*.md"))
BLOCK_SIZE_OF_THE_STUDY = 16
SMALL = json.loads((ROOT / "recipes" / "smollm2-135m" / "drafter" / "config.json").read_text())
TRAINED_BY = {
    "SmolLM2-135M-Instruct-DFlash-demo": RECIPES["recipe_of"]("smollm2-135m"),
    "SmolLM2-135M-Instruct-DFlash-b16": RECIPES["study_facts"](RECIPES["study_row"]("muon-48", 4040))["recipe"]
    | {"block_size": BLOCK_SIZE_OF_THE_STUDY},
    "SmolLM2-135M-Instruct-DFlash-b8": RECIPES["study_facts"](RECIPES["study_row"]("muon-48-small", 4040))["recipe"]
    | {"block_size": SMALL["block_size"]},
    "Qwen3.6-27B-DFlash": RECIPES["recipe_of"]("qwen3.6-27b"),
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", text, re.DOTALL)


def words(text: str) -> list[str]:
    return [word for word in shlex.split(text, comments=True) if word != "\n"]


def assert_commands(text: str, repo_id: str, target: str, block_size: int) -> None:
    """The numbers and names of all serving commands."""
    shell = [words(block) for block in blocks(text, "bash")]
    (vllm,) = (command for command in shell if command[0] == "vllm")
    speculative = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert vllm[:3] == ["vllm", "serve", target]
    assert speculative == {"method": "dflash", "model": repo_id, "num_speculative_tokens": block_size - 1}
    (sglang,) = (command for command in shell if "sglang.launch_server" in command)
    options = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert options == {
        "--model-path": target,
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": repo_id,
        "--speculative-num-draft-tokens": str(block_size),
    }
    for program in blocks(text, "python"):
        compile(program, "card", "exec")
        assert json.dumps(target) in program and json.dumps(repo_id) in program


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_our_cards_parse_and_their_commands_match_the_recipe(path):
    text = path.read_text()
    recipe = TRAINED_BY[path.stem]
    card = ModelCard(text)
    # What ModelCard could not read it would leave out: written again it is the same.
    assert ModelCardData(**card.data.to_dict()).to_dict() == card.data.to_dict()
    assert {"dflash", "speculative-decoding"} <= set(card.data.tags) and card.data.license == "apache-2.0"
    assert card.data.base_model == recipe.get("target", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert_commands(text, f"OWNER/{path.stem}", card.data.base_model, recipe["block_size"])
    (written,) = blocks(text, "yaml")
    assert all(recipe[name] == pytest.approx(value) for name, value in yaml.safe_load(written).items())
    for command in blocks(text, "bash"):
        for script in re.findall(r"recipes/[\w./-]+\.(?:py|yaml)", command):
            assert (ROOT / script).is_file(), script


def test_our_cards_are_those_of_the_recipes_now():
    """`python recipes/model_cards.py` writes them anew."""
    assert {path.name for path in CARDS} == RECIPES["CARDS"].keys()
    for path in CARDS:
        assert str(RECIPES["CARDS"][path.name]()) + "\n" == path.read_text()


def test_the_figures_of_the_trained_drafters_are_those_of_their_readme():
    readme = (ROOT / "recipes" / "smollm2-135m" / "README.md").read_text()
    cards = {
        name: (ROOT / "model_cards" / f"SmolLM2-135M-Instruct-DFlash-{name}.md").read_text() for name in ("b16", "b8")
    }
    number = r"([\d.]+)"
    tau, low, high, speed_up, sampled, speed_up_sampled = re.search(
        rf"\| `muon-48`, 4,040 steps \| {number} \({number} to {number}\) \| [\d.]+ \| {number} \([\d.]+ to [\d.]+\) "
        rf"\| {number} \([\d.]+ to [\d.]+\) \| [\d.]+ \| {number} \([\d.]+ to [\d.]+\) \|",
        readme,
    ).groups()
    assert f"| 50 | {tau} | {low} to {high} | {speed_up} |" in cards["b16"]
    assert f"at temperature 0.7 it is {sampled}, and the speed-up {speed_up_sampled}." in cards["b16"]
    tau, low, high, sampled = re.search(
        r"CPU the small drafter commits ([\d.]+) \(([\d.]+) to ([\d.]+)\) .*? ([\d.]+) \([\d.]+ to [\d.]+\) at "
        r"temperature 0.7",
        " ".join(readme.split()),
    ).groups()
    assert f"| 50 | {tau} | {low} to {high} |" in cards["b8"] and f"at temperature 0.7 it is {sampled}." in cards["b8"]
    for text, dtype in ((cards["b16"], "bfloat16"), (cards["b8"], "float32")):
        assert f"--num_prompts 50 --max_new_tokens 64 --dtype {dtype}" in text and f"both models in {dtype}" in text
        assert "num_anchors: 128" in text and "32 a step" in text
    # Runs are told apart by name, seed and steps: in the folder of the first, the second would pass for done.
    assert "--output_dir outputs/study-small" in cards["b8"] and "--output_dir" not in cards["b16"]


def test_s2_the_demos_figures_are_given_for_two_cpus():
    """CPUs round bfloat16 otherwise, and Muon trains the demo's drafter in it: no figure is that of all machines."""
    front, readme, card = (
        " ".join((ROOT / path).read_text().split())
        for path in ("README.md", "recipes/smollm2-135m/README.md", "model_cards/SmolLM2-135M-Instruct-DFlash-demo.md")
    )
    taus = []
    for number, kind in ((8, "seen"), (20, "unseen")):
        tau, low, high = re.search(rf"\| {number} {kind} \| 1.00 \| (\S+) \| (\S+) to (\S+) \|", readme).groups()
        assert f"| {number} | {tau} | {low} to {high} |" in card
        taus.append((float(tau), float(low), float(high)))
    others = re.search(r"AMX .*? `make demo` came to (\S+) on seen chats and (\S+) on unseen ones", readme).groups()
    assert "without AMX" in card and "came to {} and {}.".format(*others) in card
    (seen, *_), (unseen, *_) = taus
    assert (
        f"{seen:.1f} to {float(others[0]):.1f}, by the CPU" in front and f"{unseen} to {others[1]} on others" in front
    )
    assert all(low <= float(other) <= high for other, (_, low, high) in zip(others, taus, strict=True))


def test_the_shipped_drafter_knows_its_training():
    folder = ROOT / "recipes" / "smollm2-135m" / "drafter"
    assert read_facts(folder) == RECIPES["study_facts"](RECIPES["study_row"]("muon-48-small", 4040))


def test_the_figures_of_the_demo_are_those_of_its_readme():
    readme = (ROOT / "recipes" / "smollm2-135m" / "README.md").read_text()
    card = ModelCard.load(ROOT / "model_cards" / "SmolLM2-135M-Instruct-DFlash-demo.md")
    results = {r.dataset_name: r.metric_value for r in card.data.eval_results}
    for kind, name in (("seen", "chats it was trained on"), ("unseen", "chats it never saw")):
        number, after, low, high = re.search(
            rf"\| (\d+) {kind} \| 1.00 \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|", readme
        ).groups()
        assert results[name] == float(after)
        assert f"| {name} | {number} | {after} | {low} to {high} |" in card.text
    planned = (ROOT / "model_cards" / "Qwen3.6-27B-DFlash.md").read_text()
    assert "not trained yet" in planned and "**Not yet run.**" in planned and "model-index" not in planned


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target with a chat template, and a drafter for it."""
    root = tmp_path_factory.mktemp("models")
    target = llama_target()
    target.generation_config.eos_token_id = 258
    target.save_pretrained(root / "target")
    byte_tokenizer().save_pretrained(root / "target")
    torch.manual_seed(0)
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=2, num_taps=2, mask_token_id=MASK_TOKEN_ID, block_size=4
    )
    DFlashDraftModel(config).save_pretrained(root / "drafter", dtype=torch.bfloat16)
    return root


@pytest.mark.parametrize("reader", ["transformers", "z-lab"])
def test_the_programs_of_a_card_run(folders, reader, capsys):
    target, drafter = str(folders / "target"), str(folders / "drafter")
    checkpoint = Checkpoint(drafter, config=json.loads((folders / "drafter" / "config.json").read_text()))
    snippet = serving_commands(checkpoint)[reader].replace("'TARGET'", repr(target))
    program = python_example(snippet, target).replace("max_new_tokens=256", "max_new_tokens=8")
    exec(program, {})
    assert capsys.readouterr().out.strip()


EVALUATION = {
    "definition": "...",
    "settings": {
        "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 64, "dtype": "auto", "target_dtype": "torch.bfloat16",
        "enable_thinking": False, "hardware": "NVIDIA H200", "versions": {"torch": "2.11", "transformers": "5.24"},
    },
    "drafters": {
        "first": {
            "acceptance_length": 3.2, "num_prompts": 12, "interval": [3.0, 3.4], "speed_up": 2.5,
            "slot_acceptance": [0.9, 0.7, None], "prompts": [],
            "by_source": {
                "humaneval": {"acceptance_length": 3.5, "num_prompts": 6, "speed_up": None, "slot_acceptance": []},
                "gsm8k": {"acceptance_length": 2.9, "num_prompts": 6, "speed_up": 2.0, "slot_acceptance": []},
            },
        },
        "second": {},
    },
}  # fmt: skip
FACTS = {
    "target": {
        "id": "org/target", "revision": "abc123", "digest": "d" * 64, "model_type": "llama", "dtype": "bfloat16",
        "quantised": "quanto int8",
    },
    "continued_from": "org/base-DFlash",
    "adapter": {"default": {"r": 16, "type": "LORA"}},
    "recipe": {"enable_thinking": True, "learning_rate": 1e-3},
    "steps": 1200, "epochs": 3.0, "hours": 4.25, "hours_since_step": 0, "hardware": "2 x NVIDIA H200",
    "versions": {"torch": "2.11", "transformers": "5.24"},
    "data": {
        "documents": 1000, "tokens": 200000, "supervised_tokens": 150000, "tokens_seen": 600000,
        "longest_document": 4096, "digest": "e" * 64, "manifest": {"template_hash": "f" * 64},
    },
}  # fmt: skip


def test_a_card_tells_all_that_is_known(folders):
    checkpoint = read_folder(folders / "drafter", "me/tiny-DFlash")
    results = read_results(EVALUATION, "first")
    card = model_card(checkpoint, FACTS, results, CardOptions(license="mit", languages=["en", "de"], plots=["a.png"]))
    text = str(card)
    assert_commands(text, "me/tiny-DFlash", "org/target", 4)
    for told in (
        "| humaneval | 6 | 3.50 | - | - |", "| all | 12 | 3.20 | 3.00 to 3.40 | 2.50 |", "thinking off",
        "on NVIDIA H200", "![a](a.png)", "adapted from [org/base-DFlash]", "revision `abc123`", "quanto int8",
        "LoRA of rank 16, merged", "200,000, 150,000 of them supervised", "600,000 in 3 epochs, 1,200 steps",
        "4.2 hours", "2 x NVIDIA H200", "`ffffffffffff`", "enable_thinking: true", "thinking on;",
        "up to 4,096 tokens",
    ):  # fmt: skip
        assert told in text, told
    assert card.data.to_dict()["language"] == ["en", "de"]
    name, evaluations = model_index_to_eval_results(card.data.to_dict()["model-index"])
    assert name == "tiny-DFlash" and [e.metric_value for e in evaluations] == [3.5, 2.9, 3.2]
    assert {e.metric_type for e in evaluations} == {"acceptance_length"}


@pytest.mark.parametrize(
    ("manifest", "recipe", "told"),
    [
        ({"thinking": False}, {}, "Thinking in that data: thinking off;"),
        ({"thinking": "inferred"}, {}, "Thinking in that data: on where an answer holds some, else off;"),
        ({"thinking": None}, {}, "Thinking in that data: the chat template's own default;"),
        ({"thinking": "mixed"}, {}, "Thinking in that data: of several modes;"),
        ({"template_hash": "f" * 64}, {}, "Thinking in that data: not recorded."),
        (None, {}, "Thinking in that data: the chat template's own default;"),
        (None, {"enable_thinking": False}, "Thinking in that data: thinking off;"),
    ],
)
def test_dt3_a_card_tells_the_mode_that_the_documents_were_tokenised_in(folders, manifest, recipe, told):
    facts = {**FACTS, "recipe": recipe, "data": {**FACTS["data"], "manifest": manifest}}
    assert told in str(model_card(read_folder(folders / "drafter", "me/tiny-DFlash"), facts))


def test_dt3_documents_bring_the_mode_that_they_were_tokenised_in(tmp_path):
    tokenizer, chats, parts = byte_tokenizer(), tmp_path / "chats.jsonl", []
    chats.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}\n')
    for number, mode in enumerate(({"enable_thinking": False}, {"infer_thinking": True})):
        folder = tmp_path / str(number)
        tokenize_files(chats, folder, tokenizer, TokenizeOptions(**mode), num_proc=1)
        parts.append(open_documents(folder))
    facts = [_data(PackedDataset(data, 512))["manifest"] for data in (*parts, concatenate_datasets(parts))]
    assert [manifest["thinking"] for manifest in facts] == [False, "inferred", "mixed"]


def test_a_card_tells_what_overrides_and_whose_licences_apply(folders):
    facts = {**FACTS, "recipe": {"max_steps": 6, "num_train_epochs": 3}}
    text = str(model_card(read_folder(folders / "drafter", "me/tiny-DFlash"), facts))
    assert "max_steps: 6" in text and "num_train_epochs" not in text
    assert "That of org/base-DFlash applies to the weights that it was adapted from." in text
    assert "taken for the target's own answers" in text and "written by the target" not in text


def test_a_card_invents_nothing(folders):
    text = str(model_card(read_folder(folders / "drafter", "me/tiny-DFlash")))
    assert "**Not yet measured.**" in text and "No record of the run" in text and "not stated one" in text
    assert "`TARGET` is the target." in text and "base_model" not in text and "model-index" not in text
    assert "local folder" not in text and "adapted from" not in text
    assert "None" not in text
    hybrid = {"target": {"model_type": "qwen3_5_text"}, "recipe": {}}
    text = str(model_card(read_folder(folders / "drafter", "me/tiny-DFlash"), hybrid))
    assert "speculative_generate" in text and not blocks(text, "python")


def test_results_of_something_else_are_refused():
    with pytest.raises(ValueError, match=r"of the drafters \['first', 'second'\], not of None"):
        read_results(EVALUATION)
    with pytest.raises(ValueError, match=r"The results hold \['servers'\]; expected results.json of"):
        read_results({"servers": {}})
    with pytest.raises(ValueError, match="interrupted"):
        read_results({**EVALUATION, "finished": False}, "first")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("org/name", "org/name"), ("gpt2", "gpt2"), ("/abs/path", None), ("./rel", None), ("a/b/c", None), ("", None),
     (None, None), ("~/x", None), ("C:\\models\\x", None), (".cache/target", None), ("tests", None)],
)  # fmt: skip
def test_a_local_path_is_no_hub_id(name, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert hub_id(name) == expected


def test_supervised_tokens_are_counted_alike_in_lists_and_in_arrow():
    rows = [{"supervised_spans": [[1, 4], [6, 7]]}, {"supervised_spans": []}, {"supervised_spans": [[0, 9]]}]
    assert _supervised_tokens(rows) == _supervised_tokens(Dataset.from_list(rows)) == 13
    assert _supervised_tokens(Dataset.from_list(rows).select([2, 0])) == 13


def test_only_fields_of_the_recipe_that_differ_are_told():
    arguments = {"learning_rate": 6e-4, "num_anchors": 64, "output_dir": "/x", "hub_token": "t", "seed": 7}
    assert differing_arguments(arguments) == {"num_anchors": 64, "seed": 7}


# Arguments of ours that decide how fast, where and how visibly a run goes, and not what its drafter becomes.
OF_THE_RUN = {
    *("allow_other_template", "loss_chunk_blocks", "target_device", "target_layout", "prefetch_depth"),
    *("feature_copies", "measure_alone_steps", "compile_target", "allow_slow_target", "drafter_attn_implementation"),
    *("max_nonfinite_steps", "remote_checkpoint_dir", "allow_resume_changes", "compile_layers"),
    *("per_device_eval_batch_size", "logging_steps", "remove_unused_columns", "logging_nan_inf_filter", "use_cache"),
}


def test_a_card_tells_of_every_argument_that_decides_what_a_drafter_becomes():
    own = set(inspect.get_annotations(DFlashTrainingArguments))
    assert own - set(RECIPE_ARGUMENTS) == OF_THE_RUN & own
    assert differing_arguments({"muon": True, "loss_temperature": 0.5}) == {"muon": True, "loss_temperature": 0.5}
