# SPDX-License-Identifier: Apache-2.0
"""How fast and in how much memory completions are tokenised, against the bare tokenizer and other preparation steps.

    python recipes/benchmark_tokenize.py --target FOLDER_OR_ID [--megabytes 200] [--peers true] [--json numbers.json]

The rows are made of Python's own source files and documentation, with lengths like a thinking model's answers. Each
round times, one after the other on the same cores, `tokenize_files` from JSON lines to finished shards, and
`encode_batch` of the same rendered strings alone; their ratio is of that round. `--peers true` also times the
preparation steps of SpecForge and speculators on rows in memory, without reading and writing, if they can be imported;
what speculators asks of a server is answered within the process. Memory is that of all processes together (PSS).
Ratios are given of elapsed time and of CPU time, which other work on the machine disturbs less.
"""

import json
import os
import random
import shutil
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import datasets
import psutil
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_hf.cli import parse_config
from dflash_hf.tokenizing import TokenizeOptions, tokenize_files


# The encodings of one call take about thirty times the memory of their text, so a call gets no more than this.
CALL_CHARACTERS = 20_000_000


@dataclass
class BenchmarkArguments:
    """What is measured."""

    target: str = field(metadata={"help": "Hub id or folder of the tokenizer."})
    megabytes: int = field(default=200, metadata={"help": "Size of the JSON lines."})
    files: int = field(default=8, metadata={"help": "Files that they lie in."})
    num_proc: int = field(default=2, metadata={"help": "Processes, and threads of the bare tokenizer."})
    rounds: int = field(default=3, metadata={"help": "Pairs of measurements."})
    peers: bool = field(default=False, metadata={"help": "Also time SpecForge and speculators."})
    peer_megabytes: int = field(default=10, metadata={"help": "Size of the JSON lines that the peers get."})
    json: str | None = field(default=None, metadata={"help": "File for the numbers."})


@dataclass
class Round:
    """One pair of measurements, in tokens per second, and the ratios of elapsed and of CPU time."""

    tokenize_files: float
    encode_batch: float
    ratio: float
    cpu_ratio: float
    peak_memory_bytes: int


@dataclass
class Spent:
    """Seconds that have passed, and seconds of CPU that this process and its children have used meanwhile."""

    elapsed: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.elapsed + other.elapsed, self.cpu + other.cpu)


def texts() -> list[str]:
    """Paragraphs of Python's own library, in an order of their own."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paragraphs = []
    for path in sorted(library.rglob("*.py")):
        if "site-packages" not in path.parts and path.stat().st_size < 400_000:
            paragraphs += path.read_text(encoding="utf-8", errors="ignore").split("\n\n")
    random.Random(0).shuffle(paragraphs)
    return [paragraph for paragraph in paragraphs if paragraph.strip()]


def rows(num_bytes: int) -> Iterator[str]:
    """JSON lines of about `num_bytes` in all: prompts, and answers of 2,000 tokens on average."""
    generator, paragraphs, written = random.Random(1), texts(), 0
    while written < num_bytes:
        length = min(int(generator.gammavariate(4, 1500)), 14_000)
        start = generator.randrange(len(paragraphs))
        text, prompt = "", paragraphs[generator.randrange(len(paragraphs))][:600]
        for paragraph in [*paragraphs[start:], *paragraphs[:start]]:
            text += paragraph + "\n\n"
            if len(text) >= length:
                break
        answer = {"role": "assistant", "content": text[: max(length, 20)]}
        line = json.dumps({"messages": [{"role": "user", "content": prompt or "?"}, answer]})
        written += len(line) + 1
        yield line


def write_rows(folder: Path, num_bytes: int, num_files: int) -> None:
    """Spread rows over files of about the same size."""
    folder.mkdir()
    files = [(folder / f"part-{number:03}.jsonl").open("w") for number in range(num_files)]
    for number, line in enumerate(rows(num_bytes)):
        files[number % num_files].write(line + "\n")
    for file in files:
        file.close()


def read_chats(folder: Path) -> list[dict]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.open()]


class PeakMemory:
    """The most memory that this process and its children have together while the block runs, in bytes."""

    def __enter__(self) -> "PeakMemory":
        self.peak, self._running = 0, True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        own = psutil.Process()
        while self._running:
            total = 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)
            time.sleep(1.0)

    def __exit__(self, *exception: object) -> None:
        self._running = False
        self._thread.join()


def spent(function: Callable[[], object]) -> Spent:
    start, before = time.perf_counter(), os.times()
    function()
    return Spent(time.perf_counter() - start, sum(os.times()[:4]) - sum(before[:4]))


def time_encode_batch(tokenizer: PreTrainedTokenizerFast, folder: Path) -> tuple[Spent, int]:
    """Time and tokens of the bare tokenizer over the rendered chats; rendering them is not timed."""
    total, tokens, call, size = Spent(), 0, [], 0

    def encode() -> None:
        nonlocal tokens
        tokens += sum(len(encoding) for encoding in tokenizer.backend_tokenizer.encode_batch(call))

    for path in sorted(folder.iterdir()):
        for line in path.open():
            call.append(tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False))
            size += len(call[-1])
            if size > CALL_CHARACTERS:
                total += spent(encode)
                call, size = [], 0
    return total + spent(encode), tokens


def time_tokenize_files(tokenizer: PreTrainedTokenizerFast, folder: Path, num_proc: int) -> tuple[Spent, dict, int]:
    """Time from JSON lines to finished shards, the manifest, and the most memory."""
    output = folder.with_name("documents")
    manifest: dict = {}

    def run() -> None:
        options = TokenizeOptions(max_length=4096)
        manifest.update(tokenize_files(folder, output, tokenizer, options, num_proc=num_proc, disable_tqdm=True))

    with PeakMemory() as memory:
        time_spent = spent(run)
    shutil.rmtree(output)
    return time_spent, manifest, memory.peak


def one_round(tokenizer: PreTrainedTokenizerFast, folder: Path, num_proc: int) -> Round:
    ours, manifest, memory = time_tokenize_files(tokenizer, folder, num_proc)
    bare, tokens = time_encode_batch(tokenizer, folder)
    # What max_length cuts off was tokenised too.
    one = Round(tokens / ours.elapsed, tokens / bare.elapsed, bare.elapsed / ours.elapsed, bare.cpu / ours.cpu, memory)
    print(
        f"tokenize_files {one.tokenize_files:,.0f} tokens/s ({manifest['tokens']:,} kept), encode_batch "
        f"{one.encode_batch:,.0f} tokens/s, ratio {one.ratio:.2f}, of CPU time {one.cpu_ratio:.2f}, "
        f"{memory / 2**30:.2f} GiB",
        flush=True,
    )
    return one


def time_specforge(tokenizer: PreTrainedTokenizerFast, chats: list[dict], num_proc: int) -> Spent:
    from specforge.data.preprocessing import build_eagle3_dataset

    data = datasets.Dataset.from_list(
        [{"id": str(i), "conversations": row["messages"]} for i, row in enumerate(chats)]
    )
    return spent(
        lambda: build_eagle3_dataset(data, tokenizer, chat_template="qwen", max_length=4096, num_proc=num_proc)
    )


def time_speculators(tokenizer: PreTrainedTokenizerFast, chats: list[dict], num_proc: int) -> Spent:
    from speculators.data_generation import preprocessing

    def render(endpoint, messages, *, add_generation_prompt, tools=None, truncate_prompt_tokens=None, **kwargs):
        ids = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, return_dict=False
        )
        return ids[:truncate_prompt_tokens]

    preprocessing.render_conversation = render
    data = datasets.Dataset.from_list([{"conversations": row["messages"]} for row in chats])
    return spent(
        lambda: preprocessing.build_speculator_training_dataset(
            data, tokenizer, max_length=4096, num_proc=num_proc, render_endpoint="http://within.the.process"
        )
    )


def time_peers(tokenizer: PreTrainedTokenizerFast, folder: Path, num_proc: int, num_rounds: int) -> dict[str, dict]:
    """How many times as fast as each peer, in elapsed and in CPU time, the medians over rounds."""
    chats = read_chats(folder)
    ratios: dict[str, list[Spent]] = {"SpecForge": [], "speculators": []}
    for _ in range(num_rounds):
        for name, function in (("SpecForge", time_specforge), ("speculators", time_speculators)):
            ours, _, _ = time_tokenize_files(tokenizer, folder, num_proc)
            theirs = function(tokenizer, chats, num_proc)
            ratios[name].append(Spent(theirs.elapsed / ours.elapsed, theirs.cpu / ours.cpu))
            print(
                f"{len(chats):,} rows: tokenize_files {ours.elapsed:.2f} s, {name} {theirs.elapsed:.2f} s, "
                f"{ratios[name][-1].elapsed:.2f} times, of CPU time {ratios[name][-1].cpu:.2f} times",
                flush=True,
            )
    return {
        name: {part: statistics.median(getattr(one, part) for one in found) for part in ("elapsed", "cpu")}
        for name, found in ratios.items()
    }


def main(arguments: BenchmarkArguments) -> None:
    """Measure, print, and write the numbers."""
    os.environ["RAYON_NUM_THREADS"] = str(arguments.num_proc)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    numbers: dict = {"arguments": asdict(arguments)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "completions"
        write_rows(folder, arguments.megabytes * 1_000_000, arguments.files)
        rounds = [one_round(tokenizer, folder, arguments.num_proc) for _ in range(arguments.rounds)]
        numbers["rounds"] = [asdict(one) for one in rounds]
        numbers["ratio"] = statistics.median(one.ratio for one in rounds)
        numbers["cpu_ratio"] = statistics.median(one.cpu_ratio for one in rounds)
        # Later rounds also hold what the bare tokenizer has left to this process.
        numbers["peak_memory_bytes"] = rounds[0].peak_memory_bytes
        if arguments.peers:
            folder = Path(temporary) / "for_peers"
            write_rows(folder, arguments.peer_megabytes * 1_000_000, arguments.files)
            numbers["times_as_fast_as"] = time_peers(tokenizer, folder, arguments.num_proc, arguments.rounds)
    print(
        f"ratio to encode_batch {numbers['ratio']:.2f} (median of {len(rounds)}), of CPU time "
        f"{numbers['cpu_ratio']:.2f}, at most "
        f"{numbers['peak_memory_bytes'] / 2**30:.2f} GiB; times as fast as {numbers.get('times_as_fast_as', {})}"
    )
    if arguments.json:
        Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.json).write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    datasets.disable_progress_bars()
    main(parse_config(BenchmarkArguments, description=__doc__.split("\n")[0])[0])
    sys.exit(0)
