# SPDX-License-Identifier: Apache-2.0
"""Drafters in a real vLLM, served on loopback by its CPU build: `make test-engines`, no part of `make test`.

A server of the target alone stays up; for each drafter another one is started beside it. Its answers are those of the
target alone, its counters those of our own walk over the same tokens. Answers are greedy: with a drafter the CPU
build of 0.32.0 loses the temperature (its `_expand_kernel_impl` writes into a copy) and samples noise. Sampling is
measured on a GPU, by recipes/benchmark_serving.py.
"""

import ast
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_modeling_dflash2 import random_dflash2
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments, read_completions, tokenize_completions
from dflash_hf.acceptance import walk_documents
from dflash_hf.adapters import add_adapter, lora_config
from dflash_hf.convert_speculators import convert_speculators
from dflash_hf.serving import Server, Verifications


ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / "recipes" / "smollm2-135m"
sys.path[:0] = [str(SMOLLM2)]

from get_target import get_smollm2  # noqa: E402


pytestmark = pytest.mark.engines
ENVIRONMENT = ROOT / ".venv-vllm"
NEW_TOKENS, WINDOW, START_SECONDS = 48, 32, 600
KINDS = ("bundled", "trained", "sliding", "adapted", "converted")


# --- Servers


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def serving(target: Path, log: Path, *words: str) -> Iterator[str]:
    """The address of a vLLM server, which is stopped whatever happens; nothing listens there afterwards."""
    port = free_port()
    command = [str(ENVIRONMENT / "bin" / "vllm"), "serve", str(target), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4", "--no-enable-prefix-caching"]
    openmp = next(ENVIRONMENT.glob("lib/**/libiomp5.so"))
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    environment = os.environ | settings | {"LD_PRELOAD": str(openmp), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *words],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Also where this process is killed (PR_SET_PDEATHSIG).
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM),
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(timeout=30)
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)), "the port is still open"


def wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"vLLM did not start:\n{log.read_text()[-3000:]}")
        time.sleep(1)


def complete(url: str, prompts: list[list[int]], **settings) -> list[list[int]]:
    """The token ids of answers to prompts of token ids, all asked in one request."""
    body = {"prompt": prompts, "max_tokens": NEW_TOKENS, "return_token_ids": True, **settings}
    body["model"] = Server(url, speculates=False).model
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=600) as response:
        choices = json.load(response)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


# --- Target, prompts and drafters


@pytest.fixture(scope="module")
def target_path() -> Path:
    return get_smollm2()


@pytest.fixture(scope="module")
def target(target_path):
    return AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(target_path) -> list[list[int]]:
    """Prompts of chats, some of them longer than the window of the sliding drafter."""
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    texts = [json.loads(line)["prompt"] for line in (SMOLLM2 / "prompts.jsonl").read_text().splitlines()[:12]]
    chats = [[{"role": "user", "content": text}] for text in texts]
    rows = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]
    assert min(map(len, rows)) > WINDOW
    return rows


@pytest.fixture(scope="module")
def drafters(target, target_path, tmp_path_factory) -> dict[str, Path]:
    """A folder for each of `KINDS`."""
    root = tmp_path_factory.mktemp("drafters")
    folders = {"bundled": SMOLLM2 / "drafter", **{kind: root / kind for kind in KINDS[1:]}}

    def bundled() -> DFlashDraftModel:
        return DFlashDraftModel.from_pretrained(folders["bundled"], dtype=torch.float32)

    rows = read_completions(SMOLLM2 / "completions.jsonl")[:64]
    documents = tokenize_completions(rows, AutoTokenizer.from_pretrained(target_path), max_length=128)

    def trained(drafter, name: str, **settings):
        values = {"row_length": 512, "num_anchors": 32, "max_steps": 16, "learning_rate": 5e-4, "report_to": "none"}
        args = DFlashTrainingArguments(str(root / f"run-{name}"), **values | settings, use_cpu=True, disable_tqdm=True)
        trainer = DFlashTrainer(drafter, target, args, train_dataset=documents)
        trainer.train()
        return trainer.model

    trained(bundled(), "whole").save_pretrained(folders["trained"])
    adapter = trained(add_adapter(bundled(), lora_config(rank=4)), "adapter", learning_rate=2e-3)
    adapter.merge_and_unload().save_pretrained(folders["adapted"])
    sliding = bundled()
    sliding.save_pretrained(folders["sliding"])
    change_json(
        folders["sliding"] / "config.json",
        layer_types=["sliding_attention"] * len(sliding.layers),
        sliding_window=WINDOW,
        use_sliding_window=True,
    )
    convert_speculators(as_speculators(bundled(), root / "speculators", target_path), folders["converted"])
    return folders


def change_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def as_speculators(drafter: DFlashDraftModel, folder: Path, target_path: Path) -> Path:
    """A drafter as speculators 0.9.0 writes it."""
    from test_convert_speculators import speculators_config

    drafter.save_pretrained(folder)
    rope = {"rope_parameters": drafter.config.rope_parameters}
    config = speculators_config(drafter, str(target_path), **rope)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- What must hold


@pytest.fixture(scope="module")
def plain(target_path, prompts, tmp_path_factory) -> Iterator[tuple[str, list[list[int]]]]:
    """A server without a drafter, and its greedy answers."""
    with serving(target_path, tmp_path_factory.mktemp("plain") / "log") as url:
        yield url, complete(url, prompts, temperature=0.0)


def served_by(folder: Path, target_path: Path, log: Path, *words: str):
    tokens = json.loads((folder / "config.json").read_text())["block_size"] - 1
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": tokens}
    return serving(target_path, log, "--speculative-config", json.dumps(speculative), *words)


def equal_but_for_ties(target, prompts, answers, others) -> int:
    """How many answers are equal; where one differs, its first other token has all but the same logit."""
    equal = 0
    for prompt, one, other in zip(prompts, answers, others, strict=True):
        if one == other:
            equal += 1
            continue
        place = next(k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        with torch.no_grad():
            logits = target(torch.tensor([prompt + one[:place]])).logits[0, -1]
        assert abs(logits[one[place]] - logits[other[place]]) < 1e-3, (place, one, other)
    return equal


def counted(url: str, work) -> tuple[Verifications, list[list[int]]]:
    """The verifications by the server's counters while `work` runs, and what that returns."""
    server = Server(url)
    before = server.settled_counters()
    done = work()
    return server.settled_counters().since(before), done


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_serves_the_drafter_without_changing_an_answer(
    kind, drafters, target, target_path, prompts, plain, tmp_path
):
    drafter = DFlashDraftModel.from_pretrained(drafters[kind], dtype=torch.float32)
    with served_by(drafters[kind], target_path, tmp_path / "log") as url:
        one_by_one, answers = counted(url, lambda: [complete(url, [p], temperature=0.0)[0] for p in prompts])
        together, in_parallel = counted(url, lambda: complete(url, prompts, temperature=0.0))
    for found in (answers, in_parallel):
        assert equal_but_for_ties(target, prompts, found, plain[1]) >= len(prompts) - 2
    # Both wrote the same tokens, so that their number of verifications says how many a verification commits. When an
    # answer ends the server may have begun one more, which counts and commits nothing.
    blocks = walked_blocks(target, drafter, prompts, answers)
    for found in (one_by_one, together):
        assert 0.97 * blocks <= found.forwards <= 1.03 * (blocks + len(prompts))
        assert found.accepted >= 0.97 * (sum(map(len, answers)) - len(prompts) - blocks)


def walked_blocks(target, drafter, prompts, answers) -> int:
    """Verifications of our walk over prompts with their answers."""
    documents = [
        {"input_ids": prompt + answer, "supervised_spans": [[len(prompt), len(prompt) + len(answer)]]}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return sum(len(walk.committed) for walk in walk_documents(target, drafter, documents))


def test_evaluate_measures_the_server_and_prints_the_speed_up(drafters, target_path, plain, tmp_path):
    """By its counters and, where the server tells them, by each answer's own figures."""
    from dflash_hf.commands import main

    for words in ((), ("--per-request-spec-decode-metrics", "summary")):
        with served_by(drafters["bundled"], target_path, tmp_path / "log", *words) as url:
            given = ["--server", url, "--plain_server", plain[0], "--prompts", str(SMOLLM2 / "prompts.jsonl")]
            given += ["--num_prompts", "6", "--max_new_tokens", "32", "--output_dir", str(tmp_path / "results")]
            main(["evaluate", *given])
        results = json.loads((tmp_path / "results" / "results.json").read_text())
        (report,) = results["servers"].values()
        assert report["per_request"] == bool(words) and 1 < report["acceptance_length"] < 8
        assert results["plain_tokens_per_second"] > 0 and (tmp_path / "results" / "acceptance.png").is_file()


def test_vllms_own_arithmetic_of_dflash2_is_ours():
    """Its pure torch functions, taken out of its source since it wants another transformers, in fp32 to 1e-5."""
    (source,) = ENVIRONMENT.glob("lib/python*/site-packages/vllm/model_executor/models/qwen3_dflash2.py")
    names: dict = {"torch": torch, "F": torch.nn.functional}
    wanted = ("_grouped_conv", "_score_edges")
    body = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") in wanted]
    exec(compile(ast.Module(body, []), str(source), "exec"), names)
    drafter = random_dflash2(layer_types=["full_attention"])
    conv, selector = drafter.layers[0].attention_conv, drafter.candidate_selector
    x, y = torch.randn(2, 12, 32)
    states, logits, anchors = torch.randn(3, 5, 32), torch.randn(3, 5, 50), torch.tensor([1, 2, 3])
    with torch.no_grad():
        delta = conv.kernel_projection(x).reshape(12, 2, 2, 4)
        prepared, corrections = conv.prepare(x.view(3, 4, 32))
        sides = prepared, conv.finish(y.view(3, 4, 32), corrections)
        for side, (given, ours) in enumerate(zip((x, y), sides, strict=True)):
            theirs = names["_grouped_conv"](given, delta[:, side], conv.base_kernel[side], 4, 4, 8, 2)
            torch.testing.assert_close(ours.reshape(12, 32), theirs, rtol=0, atol=1e-5)
        candidates = selector.candidates(logits)
        unary, query = logits.gather(-1, candidates), selector.hidden_projection(states)
        tables = selector.predecessor_codebook, selector.successor_codebook
        theirs = names["_score_edges"](*tables, candidates, unary, query, anchors, 4)
        before = torch.cat([anchors[:, None, None].expand(-1, 1, 4), candidates[:, :-1]], dim=1)
        torch.testing.assert_close(selector(states, unary, candidates, before), theirs, rtol=0, atol=1e-5)
