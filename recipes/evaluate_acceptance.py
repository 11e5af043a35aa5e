# SPDX-License-Identifier: Apache-2.0
"""Measure what drafters save: acceptance length, speed-up and losslessness, by decoding here or on a running server.

    python recipes/evaluate_acceptance.py --target ID --drafters FOLDER [FOLDER ...] --presets humaneval gsm8k-100
    python recipes/evaluate_acceptance.py --server http://HOST:8000 --prompts prompts.jsonl

Prompts are rows of {"prompt": "..."} or {"messages": [...]}, with an optional "source" and "language" for the
tables, and "tools" and "chat_template_kwargs", in files as those of training data. Results go to
`output_dir`: results.json, results.md and acceptance.png. They are written every minute, after each walk or server,
and with what is measured so far when the run is interrupted or fails.
"""

import dataclasses
import importlib.util
import json
import platform
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel

import dflash_hf
from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.acceptance import (
    DEFINITION,
    AcceptanceReport,
    DecodingSettings,
    markdown,
    measure_acceptance,
    plain_answers,
    plot_reports,
    plot_servers,
    prompt_rows,
    server_markdown,
    walked_acceptance_length,
)
from dflash_hf.cli import parse_config, refuse_unused
from dflash_hf.frozen_target import COMPUTE_TYPES, check_fits, load_model, refuse_token
from dflash_hf.generation import Sampling
from dflash_hf.prompts import PRESETS, EvaluationPrompt, preset_prompts, prompt_token_ids, read_prompts
from dflash_hf.serving import Server, ServerError, ServerReport, measure_server, plain_tokens_per_second
from dflash_hf.writing import check_writable, only_writer, replace_file


# Seconds after which what is measured so far is written once more.
WRITE_EVERY = 60.0
OF_DECODING_HERE = (
    "target",
    "target_model_init_kwargs",
    "drafters",
    "sample_drafts",
    "dtype",
    "device",
    "check_walk",
    "use_cache",
)
OF_SERVERS = ("model", "plain_server", "concurrency", "timeout")


@dataclass
class EvaluationArguments:
    target: str | None = field(default=None, metadata={"help": "Hub id or folder of the target."})
    target_model_init_kwargs: dict[str, Any] | None = field(
        default=None, metadata={"help": "Arguments of from_pretrained for the target, a quantisation say, as JSON."}
    )
    drafters: list[str] | None = field(default=None, metadata={"help": "Hub ids or folders of drafters."})
    prompts: str | None = field(default=None, metadata={"help": "File or folder of prompts or chats."})
    presets: list[str] | None = field(default=None, metadata={"help": f"Known prompts: {', '.join(PRESETS)}."})
    num_prompts: int | None = field(default=None, metadata={"help": "Prompts of the file and of each preset."})
    output_dir: str = field(default="outputs/acceptance", metadata={"help": "Folder of the results."})
    max_new_tokens: int = field(default=512, metadata={"help": "Longest answer, in tokens."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature; 0 takes the best token."})
    top_p: float = field(default=1.0, metadata={"help": "Share of the probability that sampling draws from."})
    top_k: int = field(default=0, metadata={"help": "Most likely tokens that sampling draws from; 0 for all."})
    sample_drafts: bool = field(default=False, metadata={"help": "Draw drafts instead of taking the likeliest."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})
    enable_thinking: bool | None = field(default=None, metadata={"help": "Handed to the chat template if given."})
    dtype: str = field(default="auto", metadata={"help": "Type of the target; auto is the checkpoint's own."})
    device: str | None = field(default=None, metadata={"help": "Device of the models; a GPU if there is one."})
    check_walk: bool = field(default=True, metadata={"help": "Compare decoding with the walk."})
    use_cache: bool = field(
        default=True, metadata={"help": "False decodes slowly, for targets whose caches cannot be rolled back."}
    )
    server: list[str] | None = field(default=None, metadata={"help": "Addresses of vLLM or SGLang servers."})
    model: str | None = field(default=None, metadata={"help": "Model of the servers; the first that they list."})
    plain_server: str | None = field(
        default=None, metadata={"help": "Address of a server without speculation, for the speed-up."}
    )
    concurrency: int = field(default=1, metadata={"help": "Requests that a server gets at a time."})
    timeout: float = field(default=600.0, metadata={"help": "Seconds without a byte after which a request fails."})

    def __post_init__(self) -> None:
        if not self.prompts and not self.presets:
            raise ValueError("There is nothing to ask: give prompts (a file), presets, or both.")
        if bool(self.server) == bool(self.target and self.drafters):
            raise ValueError("Give either a target with drafters to decode with here, or a server to measure.")
        for name, value, least in (
            ("num_prompts", self.num_prompts, 1),
            ("max_new_tokens", self.max_new_tokens, 2),
            ("concurrency", self.concurrency, 1),
            ("timeout", self.timeout, 1e-3),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}.")
        Sampling.of(self.temperature, self.top_p, self.top_k)
        for name, values in (("drafters", self.drafters), ("server", self.server), ("presets", self.presets)):
            if len(set(values or [])) < len(values or []):
                raise ValueError(f"{name} names one twice: {' '.join(values or [])}.")
        if self.dtype != "auto" and vars(torch).get(self.dtype) not in COMPUTE_TYPES:
            raise ValueError(f"dtype is {self.dtype!r}; expected auto, bfloat16, float16 or float32.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; expected a number from 0 on, below 2**63.")
        refuse_token(self.target_model_init_kwargs, "stand in the results")
        check_device(self.device)
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("The plots need matplotlib: `pip install 'dflash_hf[evaluation]'`.")
        if self.server:
            refuse_unused(self, OF_DECODING_HERE, "on a server, which is asked as it was started")
        else:
            refuse_unused(self, OF_SERVERS, "on decoding here, without a server")
        if self.temperature == 0:
            refuse_unused(self, ("top_p", "top_k", "sample_drafts"), "at temperature 0, which takes the best token")


def check_device(name: str | None) -> None:
    """Refuse a device that is not here.

    Raises:
        ValueError: Naming it.
    """
    if name is not None and name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {name}, but torch finds no GPU; leave it out to run on the CPU.")
    try:
        torch.zeros(1, device=name).item()
    # Whatever torch says of a device that it does not know, has not, or that computes nothing.
    except RuntimeError as error:
        raise ValueError(f"device is {name}, which cannot be used ({error}); leave it out, or give cpu.") from error


def main() -> None:
    args = parse_config((EvaluationArguments,), description=__doc__.split("\n")[0])[0]
    results, alone = Results(args), ExitStack()
    try:
        with refusing():
            check_writable(Path(args.output_dir))
            alone.enter_context(only_writer(args.output_dir, "output_dir"))
        results.prompts = find_prompts(args)
        if args.server:
            measure_servers(args, results)
        else:
            evaluate(args, results)
        results.finished = True
    except (ServerError, RefusedRun) as error:
        raise SystemExit(f"{sys.argv[0]}: error: {error}") from error.__cause__
    finally:
        finish(results)
        alone.close()


def finish(results: "Results") -> None:
    """Show and write what was measured."""
    if not results.reports and not results.servers:
        return
    folder = results.args.output_dir
    try:
        # Shown first: a disk that is full by now must not take it along.
        print(f"\n{results.table()}")
    finally:
        # Nor may a terminal take the files along that is gone, or cannot show a name.
        try:
            results.write()
        except OSError as error:
            raise SystemExit(
                f"{sys.argv[0]}: error: the results could not be written to {folder} ({error})"
            ) from error
    print(f"results.json, results.md and acceptance.png are in {folder}.")


class RefusedRun(Exception):
    """Something that was given cannot be used; the message says what."""


@contextmanager
def refusing() -> Iterator[None]:
    """Errors about what was given, as distinct from faults."""
    try:
        yield
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        raise RefusedRun(str(error)) from None


def find_prompts(args: EvaluationArguments) -> list[EvaluationPrompt]:
    """The prompts of presets and file."""
    with refusing():
        # The file first: a preset may be downloaded.
        own = read_prompts(args.prompts)[: args.num_prompts] if args.prompts else []
        return [p for name in args.presets or [] for p in preset_prompts(name, args.num_prompts)] + own


@dataclass
class Results:
    """What has been measured so far."""

    args: EvaluationArguments
    prompts: list[EvaluationPrompt] = field(default_factory=list)
    reports: dict[str, AcceptanceReport] = field(default_factory=dict)
    walked: dict[str, float] = field(default_factory=dict)
    servers: dict[str, ServerReport] = field(default_factory=dict)
    plain_tokens_per_second: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    written: float = field(default_factory=time.monotonic)

    def keep(self, name: str, report: AcceptanceReport) -> AcceptanceReport:
        """Keep a drafter's report of one more prompt, with where that is from; gives the report so far."""
        earlier = self.reports[name].prompts if name in self.reports else []
        prompt, (answer,) = self.prompts[len(earlier)], report.prompts
        answer = replace(answer, source=prompt.source, language=prompt.language)
        self.reports[name] = replace(report, prompts=[*earlier, answer])
        self.write_now_and_then()
        return self.reports[name]

    def keep_server(self, url: str, report: ServerReport) -> None:
        """Keep a server's report so far."""
        self.servers[url] = report
        self.write_now_and_then()

    def write_now_and_then(self) -> None:
        """Write what a kill, which nothing can be done about, would lose."""
        if time.monotonic() - self.written > WRITE_EVERY:
            self.write_so_far()

    def write_so_far(self) -> None:
        """Write everything if that is possible."""
        try:
            self.write()
        except OSError as error:
            # There may be room by the end.
            self.written = time.monotonic()
            print(f"What is measured so far could not be written: {error}", file=sys.stderr)

    def table(self) -> str:
        """The results in Markdown."""
        if self.servers:
            text = server_markdown(self.servers, self.plain_tokens_per_second)
        else:
            text = markdown(self.reports, self.walked)
        return text if self.finished else f"The run did not finish: this is a part of its results.\n\n{text}"

    def write(self) -> None:
        """Write everything."""
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        settings = settings_of(self.args) | self.environment
        results: dict[str, Any] = {"definition": DEFINITION, "finished": self.finished, "settings": settings}
        if self.servers:
            results["plain_tokens_per_second"] = self.plain_tokens_per_second
            results["servers"] = {url: server_result(report) for url, report in self.servers.items()}
        else:
            results["walked"] = {name: value for name, value in self.walked.items() if value == value}
            results["drafters"] = {name: report_result(report) for name, report in self.reports.items()}
        replace_file(folder / "results.json", json.dumps(results, indent=1))
        text = f"{self.table()}\nSettings:\n\n```json\n{json.dumps(settings, indent=1)}\n```\n"
        replace_file(folder / "results.md", text)
        if self.servers:
            plot_servers(self.servers, folder / "acceptance.png")
        else:
            plot_reports(self.reports, folder / "acceptance.png")
        self.written = time.monotonic()


def evaluate(args: EvaluationArguments, results: Results) -> None:
    """Decode with each drafter."""
    with refusing():
        # Wrong names show before anything is computed.
        configs = {name: DFlashDraftConfig.from_pretrained(name) for name in args.drafters or []}
        target, ids = load_target(args, results.prompts)
        prompt_rows(target, ids)
        for config in configs.values():
            check_fits(config, target.config, target.get_input_embeddings().get_parameter("weight").shape[0])
    settings = DecodingSettings(
        args.max_new_tokens,
        None,
        args.temperature,
        args.top_p,
        args.top_k,
        args.sample_drafts,
        args.seed,
        args.use_cache,
    )
    cpu = f"CPU ({platform.processor() or platform.machine()}), {torch.get_num_threads()} threads"
    hardware = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else cpu
    shapes: dict[str, Any] = {}
    results.environment = {
        "device": str(target.device),
        "hardware": hardware,
        "threads": torch.get_num_threads(),
        "target_dtype": str(target.dtype),
        "drafter_shapes": shapes,
    }
    warm_up = replace(settings, max_new_tokens=min(64, args.max_new_tokens))
    # What is wrong with any of them shows before hours are spent on the others.
    drafters = {}
    for name, config in configs.items():
        print(f"Decoding with {name}", file=sys.stderr)
        with refusing():
            drafter = load_drafter(name, target)
            with naming(name), beside(target, drafter):
                measure_acceptance(target, drafter, ids[:1], check_lossless=False, progress=False, settings=warm_up)
        drafters[name] = drafter
        shapes[name] = {"parameters": drafter.num_parameters(), "block_size": config.block_size}
    plain_answers(target, ids[:1], warm_up, progress=False)
    decode(target, drafters, ids, settings, results)
    for name, drafter in drafters.items():
        if args.check_walk and not args.sample_drafts:
            with beside(target, drafter):
                results.walked[name] = walked_acceptance_length(target, drafter, results.reports[name])
        results.write_so_far()


def decode(
    target: PreTrainedModel,
    drafters: dict[str, DFlashDraftModel],
    ids: list[list[int]],
    settings: DecodingSettings,
    results: Results,
) -> None:
    """Each prompt plainly and by each drafter.

    Not one drafter after the other: machines become faster and slower by tens of percent within minutes, which the
    speed-ups would then hold.
    """
    with tqdm(ids, desc="decoding", unit="prompt") as bar:
        for row in bar:
            plain = plain_answers(target, [row], settings, progress=False)
            lengths = []
            for name, drafter in drafters.items():
                with naming(name), beside(target, drafter):
                    report = measure_acceptance(target, drafter, [row], settings=settings, plain=plain, progress=False)
                report = results.keep(name, report)
                lengths.append(f"{report.acceptance_length:.2f} x{report.speed_up:.2f}")
            bar.set_postfix_str(f"acceptance length and speed-up {', '.join(lengths)}")


def load_target(args: EvaluationArguments, prompts: list[EvaluationPrompt]) -> tuple[PreTrainedModel, list[list[int]]]:
    """The target and the token ids of the prompts."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    ids = prompt_token_ids(prompts, tokenizer, args.enable_thinking)
    given = args.target_model_init_kwargs or {}
    # Quantised weights are made where they will be, and some cannot be moved.
    model: Any = load_model(str(args.target), device if given else None, {"dtype": args.dtype, **given}).eval()
    return model if model.device.type == torch.device(device).type else model.to(device), ids


def measure_servers(args: EvaluationArguments, results: Results) -> None:
    """Measure each server."""
    settings, prompts = request_settings(args), results.prompts
    # All must be there before the first is asked.
    servers = {url: Server(url, args.timeout, model=args.model) for url in args.server or []}
    if args.plain_server:
        plain_server = Server(args.plain_server, args.timeout, speculates=False, model=args.model)
        results.plain_tokens_per_second = plain_tokens_per_second(plain_server, prompts, settings, args.concurrency)
    for url, server in servers.items():
        keep = partial(results.keep_server, url)
        measure_server(server, prompts, settings, args.concurrency, keep=keep)
        results.write_so_far()


def load_drafter(name: str, target: PreTrainedModel) -> DFlashDraftModel:
    """A drafter in the target's type, as a server runs it."""
    return DFlashDraftModel.from_pretrained(name).to(target.dtype).eval()


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Logits that are no numbers with the name of the drafter beside which they were computed."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"With {name}: {error}") from error


@contextmanager
def beside(target: PreTrainedModel, drafter: DFlashDraftModel) -> Iterator[None]:
    """A drafter on the target's device, where it stays as long as there is room for another one and its answers."""
    drafter.to(target.device)
    try:
        yield
    finally:
        if (
            target.device.type == "cuda"
            and torch.cuda.mem_get_info(target.device)[0] < 4 * drafter.get_memory_footprint()
        ):
            drafter.to("cpu")


def request_settings(args: EvaluationArguments) -> dict[str, Any]:
    """Fields of a server's requests."""
    settings: dict[str, Any] = {
        "max_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
    }
    if args.top_k:
        settings["top_k"] = args.top_k
    if args.enable_thinking is not None:
        settings["chat_template_kwargs"] = {"enable_thinking": args.enable_thinking}
    return settings | ({"seed": args.seed} if args.temperature else {})


def server_result(report: ServerReport) -> dict[str, Any]:
    """A server's figures and answers in JSON types."""
    answers = [
        {
            "source": a.prompt.source,
            "language": a.prompt.language,
            "num_tokens": a.num_tokens,
            "seconds": a.seconds,
            "text": a.text,
        }
        for a in report.answers
    ]
    return report.summary() | {"answers": answers}


def report_result(report: AcceptanceReport) -> dict[str, Any]:
    """A drafter's figures and answers in JSON types."""
    intervals = {"interval": report.bootstrap_interval(), "speed_up_interval": report.speed_up_interval()}
    groups = {
        "by_source": report.groups(lambda prompt: prompt.source),
        "by_language": report.groups(lambda prompt: prompt.language),
    }
    return (
        {name: None if low != low else [low, high] for name, (low, high) in intervals.items()}
        | {title: {name: part.summary() for name, part in parts.items()} for title, parts in groups.items()}
        | {"by_position": report.by_position(max(1, report.max_new_tokens // 16))}
        | report.to_dict()
    )


def settings_of(args: EvaluationArguments) -> dict[str, Any]:
    """The exact settings, with the releases that ran."""
    # Also where this package is used without being installed.
    versions = {
        "dflash_hf": dflash_hf.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return dataclasses.asdict(args) | {"versions": versions, "time": when}


def end_in_order(*_: Any) -> None:
    """End with what is measured so far; a scheduler may send its signal twice, and the second must not end that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_in_order)
    main()
