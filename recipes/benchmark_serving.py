# SPDX-License-Identifier: Apache-2.0
"""Tokens per second that vLLM serves with drafters and without, at several numbers of requests at once.

    python recipes/benchmark_serving.py --target T --engines plain D:7 D:3 --prompts prompts.jsonl --output served.json

It runs where vLLM is installed and needs nothing else of this repository. Each engine, a drafter with a number of
drafted tokens or `plain`, is a process of its own. All start side by side and then measure one at a time, in rounds,
so that a drift of the machine meets all of them; a speed-up is a ratio within one round. Answers end at
`--max_new_tokens` or the end of turn. The file also keeps each engine's tokens per verification, by vLLM's counters,
and its answers, which `--walk served.json` compares with the walk of this package (where that is installed). The
seconds of a round go to a file for each drafter, by which `dflash-hf evaluate` chooses the number of drafts.
"""

import argparse
import fcntl
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


PLAIN = "plain"
COUNTERS = {"drafts": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Folder or Hub id of the target.")
    parser.add_argument("--engines", nargs="+", default=[PLAIN], help="`plain`, or DRAFTER:TOKENS.")
    parser.add_argument("--prompts", help="JSON lines with `messages` or `prompt`; an answer is left out.")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16, 64], help="Requests at once.")
    parser.add_argument(
        "--num_prompts", nargs="+", type=int, help="Requests for each; default 24 and 3 times as many."
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv_cache_gib", type=float, default=4, help="Memory of each engine's key/value cache.")
    parser.add_argument("--max_model_len", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", default="served.json")
    parser.add_argument("--table", nargs="+", help="Print the table of these files and end.")
    parser.add_argument("--walk", help="Walk this file's answers with its drafters, add the figures, and end.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# --- One engine, in a process of its own


def read_prompts(path: str) -> list[list[dict[str, str]]]:
    """The chats of JSON lines, without an answer at their end; a `prompt` is a chat of one turn."""
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    chats = [row.get("messages") or [{"role": "user", "content": row["prompt"]}] for row in rows]
    return [chat[:-1] if chat[-1]["role"] == "assistant" else chat for chat in chats]


def start_engine(arguments: argparse.Namespace, name: str) -> Any:
    """A vLLM engine in this process; its start is not part of any figure."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM

    drafter, _, count = name.rpartition(":")
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": int(count)} if drafter else None
    return LLM(
        arguments.target,
        speculative_config=speculative,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_seqs=max(arguments.concurrency),
        kv_cache_memory_bytes=int(arguments.kv_cache_gib * 2**30),
        # Only asked for at the start, where several engines share a GPU.
        gpu_memory_utilization=0.05,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
    )


def serve(engine: Any, prompts: list[list[int]], at_once: int, temperature: float, max_new_tokens: int) -> dict:
    """Answer all prompts with `at_once` of them in flight; tokens, seconds, answers and the engine's counters."""
    from vllm import SamplingParams

    def counted() -> dict[str, int]:
        found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
        return {short: found.get(name, 0) for short, name in COUNTERS.items()}

    before, waiting, running = counted(), list(enumerate(prompts)), 0
    answers: dict[int, list[int]] = {}
    start = time.perf_counter()
    while waiting or running:
        while waiting and running < at_once:
            index, ids = waiting.pop(0)
            sampling = SamplingParams(temperature=temperature, max_tokens=max_new_tokens, seed=index)
            engine.llm_engine.add_request(str(index), {"prompt_token_ids": ids}, sampling)
            running += 1
        for output in engine.llm_engine.step():
            if output.finished:
                answers[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
                running -= 1
    seconds = time.perf_counter() - start
    counts = {name: value - before[name] for name, value in counted().items()}
    return {"seconds": seconds, "answers": [answers[index] for index in range(len(prompts))], **counts}


def wait_for_the_others(arguments: argparse.Namespace) -> None:
    """Until the parent says that every engine has started or failed: a start would disturb what is measured."""
    go = Path(f"{arguments.output}.go")
    while not go.exists():
        time.sleep(0.2)


def child(arguments: argparse.Namespace) -> None:
    """Start one engine and measure it whenever it is its turn; a line of JSON for each measurement."""
    chats, started = read_prompts(arguments.prompts), time.perf_counter()
    engine = start_engine(arguments, arguments.child)
    template: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    ids = [list(engine.get_tokenizer().apply_chat_template(chat, **template)) for chat in chats]
    print(json.dumps({"engine": arguments.child, "start_seconds": time.perf_counter() - started}), flush=True)
    wait_for_the_others(arguments)
    numbers = arguments.num_prompts or [max(24, 3 * at_once) for at_once in arguments.concurrency]
    pairs = list(zip(arguments.concurrency, numbers, strict=True))
    # Sampling changes what is accepted, not how costs grow, so it is measured at the first concurrency alone.
    cases = [(t, pair) for t in arguments.temperatures for pair in (pairs if t == 0 else pairs[:1])]
    with open(f"{arguments.output}.lock", "w") as turn:
        for round_number, (temperature, (at_once, number)) in itertools.product(range(-1, arguments.rounds), cases):
            prompts = [ids[index % len(ids)] for index in range(number)]
            # The round before the first warms up.
            new_tokens = 16 if round_number < 0 else arguments.max_new_tokens
            fcntl.flock(turn, fcntl.LOCK_EX)
            figures = serve(engine, prompts, at_once, temperature, new_tokens)
            fcntl.flock(turn, fcntl.LOCK_UN)
            case = {"engine": arguments.child, "temperature": temperature, "at_once": at_once, "round": round_number}
            case |= {"tokens": sum(map(len, figures["answers"])), "prompts": prompts} | figures
            # Answers of one round and few prompts are enough to walk over.
            if round_number or at_once != arguments.concurrency[0]:
                case |= {"prompts": None, "answers": None}
            if round_number >= 0:
                print(json.dumps(case), flush=True)
            # The others' turn, where one is waiting.
            time.sleep(0.05)


# --- All engines, and what they say together


def measure(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Run an engine for each name and write all their figures."""
    folder = Path(arguments.output).resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    go = Path(f"{arguments.output}.go")
    go.unlink(missing_ok=True)
    children: dict[str, subprocess.Popen] = {}
    lines: list[dict[str, Any]] = []
    try:
        for name in dict.fromkeys([PLAIN, *arguments.engines]):
            log = folder / f"engine-{len(children)}"
            command = [sys.executable, str(Path(__file__).resolve()), *argv, "--child", name]
            with open(f"{log}.jsonl", "w") as output, open(f"{log}.log", "w") as errors:
                children[name] = subprocess.Popen(command, stdout=output, stderr=errors)
            print(f"{name}: see {log}.log", flush=True)
        waiting = {f"engine-{number}.jsonl": process for number, process in enumerate(children.values())}
        while any(p.poll() is None and '{"engine"' not in (folder / name).read_text() for name, p in waiting.items()):
            time.sleep(0.5)
        go.touch()
        for number, (name, process) in enumerate(children.items()):
            if process.wait():
                print(f"{name} failed ({process.returncode}); its log says why.", flush=True)
            # vLLM prints lines of its own.
            output = (folder / f"engine-{number}.jsonl").read_text().splitlines()
            lines += [json.loads(line) for line in output if line.startswith('{"engine"')]
    finally:
        for process in children.values():
            process.kill()
    starts = {line["engine"]: line["start_seconds"] for line in lines if "start_seconds" in line}
    runs = [line for line in lines if "seconds" in line]
    settings = {key: value for key, value in vars(arguments).items() if key not in ("child", "table", "walk")}
    results = {"settings": settings, "start_seconds": starts, "runs": runs}
    Path(arguments.output).write_text(json.dumps(results))
    write_costs(results, Path(arguments.output))
    print(table(results))


def write_costs(results: dict[str, Any], output: Path) -> None:
    """The seconds of a round by number of drafts and requests at once, a file for each drafter.

    `dflash-hf evaluate --draft_lengths 1 3 5 7 10 15 --costs FILE` chooses the number of drafts by them. Of N requests
    at once a round commits N drafts' tokens; the prefills are part of it.
    """
    plain = [(0, run) for run in results["runs"] if run["engine"] == PLAIN]
    drafted = [(*run["engine"].rpartition(":")[::2], run) for run in results["runs"] if run["engine"] != PLAIN]
    for drafter in dict.fromkeys(name for name, _, _ in drafted):
        seconds: dict[tuple[int, int], list[float]] = {}
        for count, run in [*plain, *((int(count), run) for name, count, run in drafted if name == drafter)]:
            if run["temperature"] == 0:
                rounds = (run["drafts"] or run["tokens"]) / run["at_once"]
                seconds.setdefault((run["at_once"], count), []).append(run["seconds"] / rounds)
        names = ("batch_size", "num_draft_tokens", "target_seconds")
        costs = [dict(zip(names, (*case, statistics.median(found)), strict=True)) for case, found in seconds.items()]
        path = output.with_name(f"{output.stem}-costs-{Path(drafter).name}.json")
        path.write_text(json.dumps({"costs": costs}, indent=1))


def of_case(runs: list[dict], engine: str, temperature: float, at_once: int) -> dict[int, dict]:
    """The runs of one case by round."""
    wanted = (engine, temperature, at_once)
    return {run["round"]: run for run in runs if (run["engine"], run["temperature"], run["at_once"]) == wanted}


def summary(results: dict[str, Any]) -> list[dict[str, Any]]:
    """For each case: median tokens/s, speed-up over plain (median, least and most of the rounds), tokens a round."""
    runs, rows = results["runs"], []
    cases = dict.fromkeys((run["temperature"], run["at_once"], run["engine"]) for run in runs)
    for temperature, at_once, engine in sorted(cases):
        own, plain = (of_case(runs, name, temperature, at_once) for name in (engine, PLAIN))
        speed = {number: run["tokens"] / run["seconds"] for number, run in own.items()}
        ratios = [speed[n] * plain[n]["seconds"] / plain[n]["tokens"] for n in speed if n in plain]
        drafts = sum(run["drafts"] for run in own.values())
        accepted = sum(run["accepted"] for run in own.values())
        row = {"engine": engine, "temperature": temperature, "at_once": at_once}
        row |= {"tokens_per_second": statistics.median(speed.values()), "rounds": len(speed)}
        row["tokens_per_verification"] = 1 + accepted / drafts if drafts else None
        if ratios and engine != PLAIN:
            row |= {"speed_up": statistics.median(ratios), "speed_up_range": [min(ratios), max(ratios)]}
        if temperature == 0 and engine != PLAIN and own.get(0, {}).get("answers") and plain.get(0, {}).get("answers"):
            pairs = list(zip(own[0]["answers"], plain[0]["answers"], strict=True))
            row["equal_answers"] = [sum(a == b for a, b in pairs), len(pairs)]
        rows.append(
            row | {key: value for key, value in results.get("walked", {}).get(engine, {}).items() if not temperature}
        )
    return rows


def table(results: dict[str, Any]) -> str:
    """Markdown; a speed-up below 1 is named as what it is."""
    lines = [
        "| engine | temperature | at once | tokens/s | speed-up | tokens per verification | walk | equal answers |"
    ]
    lines.append("|---" * 8 + "|")
    for row in summary(results):
        low, high = row.get("speed_up_range", (0, 0))
        faster = "" if high >= 1 else ", does not pay"
        speed_up = f"{row['speed_up']:.2f} ({low:.2f} to {high:.2f}{faster})" if "speed_up" in row else "-"
        tau = row["tokens_per_verification"]
        equal = "{} of {}".format(*row["equal_answers"]) if "equal_answers" in row else "-"
        cells = [Path(row["engine"]).name, f"{row['temperature']:g}", str(row["at_once"])]
        cells += [f"{row['tokens_per_second']:,.0f}", speed_up, f"{tau:.3f}" if tau else "-"]
        cells += [f"{row['walk']:.3f}" if "walk" in row else "-", equal]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def walk(path: str) -> None:
    """Add the acceptance length by this package's walk over the answers that the engines wrote greedily."""
    import torch
    from transformers import AutoModelForCausalLM

    from dflash_hf import DFlashDraftModel
    from dflash_hf.acceptance import walk_documents

    results = json.loads(Path(path).read_text())
    settings = {"dtype": torch.float32} if not torch.cuda.is_available() else {"dtype": torch.bfloat16}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(results["settings"]["target"], **settings).to(device)
    results["walked"] = {}
    for run in results["runs"]:
        if run["engine"] == PLAIN or run["temperature"] or not run["answers"]:
            continue
        folder, _, count = run["engine"].rpartition(":")
        drafter = DFlashDraftModel.from_pretrained(folder, **settings).to(device)
        pairs = [(len(prompt), prompt + answer) for prompt, answer in zip(run["prompts"], run["answers"], strict=True)]
        documents = [{"input_ids": ids, "supervised_spans": [[start, len(ids)]]} for start, ids in pairs]
        answers = walk_documents(target, drafter, documents, progress=True, num_draft_tokens=int(count))
        accepted = [number for answer in answers for number in answer.accepted]
        results["walked"][run["engine"]] = {"walk": 1 + statistics.mean(accepted)}
    Path(path).write_text(json.dumps(results))
    print(table(results))


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    if arguments.table:
        print("\n\n".join(table(json.loads(Path(path).read_text())) for path in arguments.table))
    elif arguments.walk:
        walk(arguments.walk)
    elif arguments.child:
        child(arguments)
    else:
        measure(arguments, argv)


if __name__ == "__main__":
    main()
