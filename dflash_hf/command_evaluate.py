# SPDX-License-Identifier: Apache-2.0
"""Measure what drafters save: acceptance length, speed-up and losslessness, by decoding here or on a running server.

    dflash-hf evaluate --target ID --drafters FOLDER [FOLDER ...] --presets humaneval gsm8k-100
    dflash-hf evaluate --target ID --drafters FOLDER --prompts FILE --draft_lengths 1 3 5 7 10 15 --batch_sizes 1 16
    dflash-hf evaluate --server http://HOST:8000 --prompts prompts.jsonl

[`read_prompts`] says what a prompt is; an answer at a chat's end is left out. results.json, results.md and
acceptance.png go to `output_dir`. They are written every minute, after each walk or server, and with what is measured
so far when the run is interrupted or fails.
"""

import importlib.util
import json
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from . import draft_length
from .acceptance import (
    DEFINITION,
    AcceptanceReport,
    DecodingSettings,
    in_batches,
    markdown,
    measure_acceptance,
    plain_answers,
    plot_reports,
    plot_servers,
    prompt_rows,
    server_markdown,
    trained_mode,
    walked_acceptance_length,
)
from .cli import parse_config, refuse_unused
from .configuration_dflash import DFlashDraftConfig
from .draft_length import DraftLengths
from .frozen_target import COMPUTE_TYPES, check_fits, load_model, refuse_token
from .generation import Sampling
from .modeling_dflash import DFlashDraftModel
from .prompts import PRESETS, EvaluationPrompt, preset_prompts, prompt_token_ids, read_prompts
from .serving import Server, ServerError, ServerReport, measure_server, plain_tokens_per_second
from .writing import check_writable, only_writer, replace_file


logger = logging.get_logger(__name__)

# Seconds after which what is measured so far is written once more.
WRITE_EVERY = 60.0
OF_DECODING_HERE = ["target", "target_model_init_kwargs", "sample_drafts", "dtype", "device", "check_walk"]
OF_DECODING_HERE += ["use_cache", "batch_size", "num_draft_tokens", "draft_lengths", "batch_sizes", "costs"]
OF_SERVERS = ("model", "plain_server", "concurrency", "timeout")
LEAST = {"num_prompts": 1, "max_new_tokens": 2, "concurrency": 1, "timeout": 1e-3, "batch_size": 1}


@dataclass
class EvaluationArguments:
    """What is measured, on which prompts, and how they are decoded."""

    target: str | None = field(default=None, metadata={"help": "Hub id or folder of the target."})
    target_model_init_kwargs: dict[str, Any] | None = field(
        default=None, metadata={"help": "Arguments of from_pretrained for the target, a quantisation say, as JSON."}
    )
    drafters: list[str] | None = field(
        default=None, metadata={"help": "Hub ids or folders of drafters; names of those that servers have, for plots."}
    )
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
    enable_thinking: bool | None = field(default=None, metadata={"help": "Mode of the chats; that of the training."})
    dtype: str = field(default="auto", metadata={"help": "Type of the target; auto is the checkpoint's own."})
    device: str | None = field(default=None, metadata={"help": "Device of the models; a GPU if there is one."})
    check_walk: bool = field(default=True, metadata={"help": "Compare decoding with the walk."})
    use_cache: bool = field(default=True, metadata={"help": "False is slow, for caches that cannot be rolled back."})
    batch_size: int = field(default=1, metadata={"help": "Prompts decoded together; speed-ups are of so many."})
    num_draft_tokens: int | None = field(default=None, metadata={"help": "Drafts of a block; by default all."})
    draft_lengths: list[int] | None = field(
        default=None, metadata={"help": "Drafts of blocks to compare: 1 3 5 7 10 15, say; too long ones are left out."}
    )
    batch_sizes: list[int] | None = field(default=None, metadata={"help": "Sequences at once to compare for; 1."})
    costs: str | None = field(default=None, metadata={"help": "JSON file of rounds' costs, instead of timing them."})
    server: list[str] | None = field(default=None, metadata={"help": "Addresses of vLLM or SGLang servers."})
    model: str | None = field(default=None, metadata={"help": "Model of the servers; the first that they list."})
    plain_server: str | None = field(default=None, metadata={"help": "Address of a server without speculation."})
    concurrency: int = field(default=1, metadata={"help": "Requests that a server gets at a time."})
    timeout: float = field(default=600.0, metadata={"help": "Seconds without a byte after which a request fails."})

    def __post_init__(self) -> None:
        if not self.prompts and not self.presets:
            raise ValueError("There is nothing to ask: give prompts (a file), presets, or both.")
        if bool(self.server) == bool(self.target and self.drafters):
            raise ValueError("Give either a target with drafters to decode with here, or a server to measure.")
        for name, least in LEAST.items():
            if vars(self)[name] is not None and vars(self)[name] < least:
                raise ValueError(f"{name} is {vars(self)[name]}; expected at least {least}.")
        Sampling.of(self.temperature, self.top_p, self.top_k)
        for name in ("drafters", "server", "presets", "draft_lengths", "batch_sizes"):
            values = vars(self)[name] or []
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names one twice: {' '.join(map(str, values))}.")
        for name in ("draft_lengths", "batch_sizes"):
            if min(vars(self)[name] or [1]) < 1:
                raise ValueError(f"{name} is {vars(self)[name]}; expected numbers of at least 1.")
        if self.dtype != "auto" and vars(torch).get(self.dtype) not in COMPUTE_TYPES:
            raise ValueError(f"dtype is {self.dtype!r}; expected auto, bfloat16, float16 or float32.")
        refuse_token(self.target_model_init_kwargs, "stand in the results")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("The plots need matplotlib: `pip install 'dflash_hf[evaluation]'`.")
        if self.server:
            refuse_unused(self, OF_DECODING_HERE, "on a server, which is asked as it was started")
            if len(self.drafters or self.server) != len(self.server):
                raise ValueError(
                    f"drafters names {len(self.drafters or [])} for {len(self.server)} servers; expected one for each."
                )
        else:
            refuse_unused(self, OF_SERVERS, "on decoding here, without a server")
        if self.temperature == 0:
            refuse_unused(self, ("top_p", "top_k", "sample_drafts"), "at temperature 0, which takes the best token")
        if self.costs or not self.draft_lengths:
            refuse_unused(self, ("batch_sizes",), "where no costs are measured, without draft_lengths or with costs")
        if not self.draft_lengths:
            refuse_unused(self, ("costs",), "without draft_lengths")
        elif not self.costs and not self.use_cache:
            raise ValueError("draft_lengths needs costs where use_cache is false: rounds are timed with caches.")


def main(argv: Sequence[str] | None = None) -> None:
    """`dflash-hf evaluate`."""
    before = signal.signal(signal.SIGTERM, _end_in_order)
    try:
        description = (__doc__ or "").split("\n")[0]
        args = parse_config(EvaluationArguments, argv, description=description, prog="dflash-hf evaluate")[0]
        measure(args, Results(args))
    # What is wrong with an option, a model, a file or a server is said without a traceback.
    except (ValueError, OSError, ImportError, FloatingPointError, ServerError) as error:
        raise SystemExit(f"dflash-hf evaluate: error: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def measure(args: EvaluationArguments, results: "Results") -> None:
    """Measure what is asked for, and show and write what was measured, however it ends."""
    check_writable(Path(args.output_dir))
    with only_writer(args.output_dir, "output_dir"):
        try:
            # The file first: a preset may be downloaded.
            own = read_prompts(args.prompts)[: args.num_prompts] if args.prompts else []
            results.prompts = [p for name in args.presets or [] for p in preset_prompts(name, args.num_prompts)] + own
            (measure_servers if args.server else evaluate)(args, results)
            results.finished = True
        finally:
            results.finish()


def _end_in_order(*_: Any) -> None:
    # A scheduler may send its signal twice, and the second must not end the writing of what is measured so far.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


# --- What has been measured so far, and where it is written.


@dataclass
class Results:
    """What has been measured so far, by drafter or by the address of a server."""

    args: EvaluationArguments
    prompts: list[EvaluationPrompt] = field(default_factory=list)
    reports: dict[str, AcceptanceReport] = field(default_factory=dict)
    walked: dict[str, float] = field(default_factory=dict)
    lengths: dict[str, DraftLengths] = field(default_factory=dict)
    servers: dict[str, ServerReport] = field(default_factory=dict)
    plain_tokens_per_second: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    written: float = field(default_factory=time.monotonic)

    def keep(self, name: str, report: AcceptanceReport) -> AcceptanceReport:
        """Keep a drafter's report of the next prompts, with where those are from; gives the report so far."""
        earlier = self.reports[name].prompts if name in self.reports else []
        new = zip(report.prompts, self.prompts[len(earlier) :], strict=False)
        answers = [replace(answer, source=prompt.source, language=prompt.language) for answer, prompt in new]
        self.reports[name] = replace(report, prompts=[*earlier, *answers])
        self.write_so_far(WRITE_EVERY)
        return self.reports[name]

    def keep_server(self, url: str, report: ServerReport) -> None:
        """Keep a server's report so far."""
        self.servers[url] = report
        self.write_so_far(WRITE_EVERY)

    def write_so_far(self, every: float = 0.0) -> None:
        """Write what a kill would lose, if the last time is long enough ago and the disk takes it."""
        if time.monotonic() - self.written >= every:
            try:
                self.write()
            except OSError as error:
                # There may be room by the end.
                self.written = time.monotonic()
                print(f"What is measured so far could not be written: {error}", file=sys.stderr)

    def finish(self) -> None:
        """Show and write what was measured."""
        if not self.reports and not self.servers:
            return
        try:
            # Shown first: a disk that is full by now must not take it along.
            print(f"\n{self.table()}")
        finally:
            # Nor may a terminal take the files along that is gone, or cannot show a name.
            self.write()
        print(f"results.json, results.md and acceptance.png are in {self.args.output_dir}.")

    def table(self) -> str:
        """The results in Markdown."""
        text = "" if self.finished else "The run did not finish: this is a part of its results.\n\n"
        if self.servers:
            return text + server_markdown(self.servers, self.plain_tokens_per_second)
        text += markdown(self.reports, self.walked)
        return f"{text}\n{draft_length.markdown(self.lengths, str(self.args.target))}" if self.lengths else text

    def write(self) -> None:
        """Write everything."""
        folder = Path(self.args.output_dir)
        when = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        # Also where this package is used without being installed.
        versions = {name: version(name) for name in ("dflash_hf", "torch", "transformers")}
        settings = asdict(self.args) | {"versions": versions} | when | self.environment
        results: dict[str, Any] = {"definition": DEFINITION, "finished": self.finished, "settings": settings}
        if self.servers:
            results["plain_tokens_per_second"] = self.plain_tokens_per_second
            results["servers"] = {url: _server_result(report) for url, report in self.servers.items()}
            plot_servers(self.servers, folder / "acceptance.png", self.args.drafters)
        else:
            results["walked"] = {name: value for name, value in self.walked.items() if value == value}
            results["drafters"] = {name: _report_result(report) for name, report in self.reports.items()}
            plot_reports(self.reports, folder / "acceptance.png", str(self.args.target))
        if self.lengths:
            results["draft_lengths"] = {name: own.to_dict() for name, own in self.lengths.items()}
            draft_length.plot(self.lengths, folder / "draft_lengths.png", str(self.args.target))
        replace_file(folder / "results.json", json.dumps(results, indent=1))
        text = f"{self.table()}\nSettings:\n\n```json\n{json.dumps(settings, indent=1)}\n```\n"
        replace_file(folder / "results.md", text)
        self.written = time.monotonic()


def _server_result(report: ServerReport) -> dict[str, Any]:
    """A server's figures and answers in JSON types."""
    answers = [
        {name: vars(a)[name] for name in ("num_tokens", "seconds", "text")}
        | {"source": a.prompt.source, "language": a.prompt.language}
        for a in report.answers
    ]
    return report.summary() | {"answers": answers}


def _report_result(report: AcceptanceReport) -> dict[str, Any]:
    """A drafter's figures and answers in JSON types."""
    intervals = {"interval": report.bootstrap_interval(), "speed_up_interval": report.speed_up_interval()}
    result: dict[str, Any] = {name: None if low != low else [low, high] for name, (low, high) in intervals.items()}
    for name in ("source", "language"):
        result[f"by_{name}"] = {value: part.summary() for value, part in report.groups(name).items()}
    return result | {"by_position": report.by_position()} | report.to_dict()


# --- Decoding here.


def evaluate(args: EvaluationArguments, results: Results) -> None:
    """Decode with each drafter."""
    # Wrong names show before anything is computed.
    configs = {name: DFlashDraftConfig.from_pretrained(name) for name in args.drafters or []}
    costs = draft_length.read_costs(args.costs) if args.costs else None
    args.enable_thinking = thinking_mode(args)
    target, ids = load_target(args, results.prompts)
    prompt_rows(target, ids)
    for config in configs.values():
        check_fits(config, target.config, target.get_input_embeddings().get_parameter("weight").shape[0])
    how = asdict(args)
    settings = DecodingSettings(**{name: how[name] for name in vars(DecodingSettings(2)) if name != "eos_token_id"})
    shapes: dict[str, Any] = {}
    # What a speed depends on besides the settings.
    hardware = f"CPU ({platform.processor() or platform.machine()}), {torch.get_num_threads()} threads"
    hardware = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else hardware
    results.environment = {"device": str(target.device), "hardware": hardware, "threads": torch.get_num_threads()}
    results.environment |= {"target_dtype": str(target.dtype), "drafter_shapes": shapes}
    warm_up = replace(settings, max_new_tokens=min(64, args.max_new_tokens))
    # What is wrong with any of them shows before hours are spent on the others.
    drafters: dict[str, Any] = {}
    for name, config in configs.items():
        print(f"Decoding with {name}", file=sys.stderr)
        # In the target's type, as a server runs it.
        drafters[name] = drafter = DFlashDraftModel.from_pretrained(name).to(target.device, target.dtype).eval()
        with named(name):
            measure_acceptance(
                target, drafter, ids[: args.batch_size], check_lossless=False, progress=False, settings=warm_up
            )
        shapes[name] = {"parameters": drafter.num_parameters(), "block_size": config.block_size}
    plain_answers(target, ids[: args.batch_size], warm_up, progress=False)
    decode(target, drafters, ids, settings, results)
    for name, drafter in drafters.items():
        with named(name):
            if args.check_walk and not args.sample_drafts:
                results.walked[name] = walked_acceptance_length(target, drafter, results.reports[name])
            if args.draft_lengths:
                given = (args.draft_lengths, args.batch_sizes or [1], costs)
                results.lengths[name] = draft_length.foretell(target, drafter, results.reports[name], *given)
        results.write_so_far()


def thinking_mode(args: EvaluationArguments) -> bool | None:
    """The mode that the drafters were trained in, unless another is given; None for the template's default."""
    modes = {name: mode for name in args.drafters or [] if (mode := trained_mode(name)) is not None}
    given = args.enable_thinking
    if given is None and len(set(modes.values())) == 1:
        given = next(iter(modes.values()))
        logger.warning(f"enable_thinking is {given}, the mode of the drafters' training data.")
    for name, mode in modes.items():
        if mode != given:
            logger.warning(f"{name} was trained with enable_thinking={mode}, and is measured with {given}.")
    return given


def load_target(args: EvaluationArguments, prompts: list[EvaluationPrompt]) -> tuple[PreTrainedModel, list[list[int]]]:
    """The target and the token ids of the prompts."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    ids = prompt_token_ids(prompts, tokenizer, args.enable_thinking)
    given = args.target_model_init_kwargs or {}
    # Quantised weights are made where they will be, and some cannot be moved.
    model: Any = load_model(str(args.target), device if given else None, {"dtype": args.dtype, **given}).eval()
    return model if model.device.type == torch.device(device).type else model.to(device), ids


def decode(
    target: PreTrainedModel,
    drafters: dict[str, DFlashDraftModel],
    ids: list[list[int]],
    settings: DecodingSettings,
    results: Results,
) -> None:
    """Each batch of prompts plainly and by each drafter.

    Not one drafter after the other: machines become faster and slower by tens of percent within minutes, which the
    speed-ups would then hold.
    """
    with tqdm(in_batches(ids, settings.batch_size), desc="decoding", unit="batch") as bar:
        for rows in bar:
            plain = plain_answers(target, rows, settings, progress=False)
            lengths = []
            for name, drafter in drafters.items():
                with named(name):
                    report = measure_acceptance(target, drafter, rows, settings=settings, plain=plain, progress=False)
                report = results.keep(name, report)
                lengths.append(f"{report.acceptance_length:.2f} x{report.speed_up:.2f}")
            bar.set_postfix_str(f"acceptance length and speed-up {', '.join(lengths)}")


@contextmanager
def named(name: str) -> Iterator[None]:
    """Logits that are not numbers are said with the drafter's name."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"With {name}: {error}") from error


# --- Measuring servers.


def measure_servers(args: EvaluationArguments, results: Results) -> None:
    """Measure each server."""
    settings: dict[str, Any] = {"max_tokens": args.max_new_tokens}
    settings |= {"temperature": args.temperature, "top_p": args.top_p}
    settings |= {"top_k": args.top_k} if args.top_k else {}
    settings |= {"seed": args.seed} if args.temperature else {}
    if args.enable_thinking is not None:
        settings["chat_template_kwargs"] = {"enable_thinking": args.enable_thinking}
    # All must be there before the first is asked.
    servers = {url: Server(url, args.timeout, model=args.model) for url in args.server or []}
    if args.plain_server:
        plain = Server(args.plain_server, args.timeout, speculates=False, model=args.model)
        results.plain_tokens_per_second = plain_tokens_per_second(plain, results.prompts, settings, args.concurrency)
    for url, server in servers.items():
        measure_server(server, results.prompts, settings, args.concurrency, keep=partial(results.keep_server, url))
        results.write_so_far()
