# SPDX-License-Identifier: Apache-2.0
"""Measure what drafters save: acceptance length, speed-up and losslessness, by decoding here or on a running server.

    python recipes/evaluate_acceptance.py --target ID --drafters FOLDER [FOLDER ...] --presets humaneval gsm8k-100
    python recipes/evaluate_acceptance.py --server http://HOST:8000 --prompts prompts.jsonl

Prompts are JSON lines of {"prompt": "..."} or {"messages": [...]}, with an optional "source" and "language" for the
tables. Results go to `output_dir`: results.json, results.md and acceptance.png.
"""

import dataclasses
import importlib.metadata
import json
import platform
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dflash_hf import DFlashDraftModel
from dflash_hf.acceptance import (
    AcceptanceReport,
    DecodingSettings,
    measure_acceptance,
    plain_answers,
    walked_acceptance_length,
)
from dflash_hf.acceptance_files import DEFINITION, markdown, plot_reports, plot_servers, server_markdown
from dflash_hf.cli import parse_config
from dflash_hf.evaluation_prompts import PRESETS, EvaluationPrompt, preset_prompts, prompt_token_ids, read_prompts
from dflash_hf.serving import Server, ServerReport, measure_server, plain_tokens_per_second


@dataclass
class EvaluationArguments:
    target: str | None = field(default=None, metadata={"help": "Hub id or folder of the target."})
    drafters: list[str] | None = field(default=None, metadata={"help": "Hub ids or folders of drafters."})
    prompts: str | None = field(default=None, metadata={"help": "JSON lines of prompts or chats."})
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
    check_walk: bool = field(default=True, metadata={"help": "Compare greedy decoding with the walk."})
    server: list[str] | None = field(default=None, metadata={"help": "Addresses of vLLM or SGLang servers."})
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


def main() -> None:
    args = parse_config((EvaluationArguments,), description=__doc__.split("\n")[0])[0]
    prompts = [prompt for name in args.presets or [] for prompt in preset_prompts(name, args.num_prompts)]
    if args.prompts:
        prompts += read_prompts(args.prompts)[: args.num_prompts]
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"definition": DEFINITION, "settings": settings_of(args)}
    if args.server:
        text, figures = measure_servers(args, prompts, folder)
        results |= figures
    else:
        reports, walked, environment = evaluate(args, prompts)
        text = markdown(reports, walked)
        plot_reports(reports, folder / "acceptance.png")
        results["settings"] |= environment
        walked = {name: value for name, value in walked.items() if value == value}
        results |= {"walked": walked, "drafters": {name: report_result(r) for name, r in reports.items()}}
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    settings = json.dumps(results["settings"], indent=1)
    (folder / "results.md").write_text(f"{text}\nSettings:\n\n```json\n{settings}\n```\n")
    print(f"\n{text}\nresults.json, results.md and acceptance.png are in {folder}.")


def evaluate(
    args: EvaluationArguments, prompts: list[EvaluationPrompt]
) -> tuple[dict[str, AcceptanceReport], dict[str, float], dict[str, Any]]:
    """Decode with each drafter: reports and walked acceptance lengths by name, and what it ran on."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).to(device).eval()
    ids = prompt_token_ids(prompts, tokenizer, args.enable_thinking)
    settings = DecodingSettings(
        args.max_new_tokens, None, args.temperature, args.top_p, args.top_k, args.sample_drafts, args.seed
    )
    warm_up = replace(settings, max_new_tokens=min(64, args.max_new_tokens))
    plain_answers(target, ids[:1], warm_up, progress=False)
    plain = plain_answers(target, ids, settings)
    reports, walked, shapes = {}, {}, {}
    for name in args.drafters or []:
        drafter = load_drafter(name, target)
        measure_acceptance(target, drafter, ids[:1], check_lossless=False, progress=False, settings=warm_up)
        report = measure_acceptance(target, drafter, ids, settings=settings, plain=plain)
        answers = [
            replace(answer, source=prompt.source, language=prompt.language)
            for answer, prompt in zip(report.prompts, prompts, strict=True)
        ]
        reports[name] = replace(report, prompts=answers)
        shapes[name] = {"parameters": drafter.num_parameters(), "block_size": drafter.config.block_size}
        if args.check_walk and args.temperature == 0:
            walked[name] = walked_acceptance_length(target, drafter, report)
    hardware = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.processor()
    environment = {"device": str(target.device), "hardware": hardware, "threads": torch.get_num_threads()}
    return reports, walked, environment | {"target_dtype": str(target.dtype), "drafter_shapes": shapes}


def measure_servers(
    args: EvaluationArguments, prompts: list[EvaluationPrompt], folder: Path
) -> tuple[str, dict[str, Any]]:
    """Measure each server: the table, and the figures in JSON types."""
    settings, plain = request_settings(args), None
    # All must be there before the first is asked.
    servers = {url: Server(url, args.timeout) for url in args.server or []}
    if args.plain_server:
        plain_server = Server(args.plain_server, args.timeout, speculates=False)
        plain = plain_tokens_per_second(plain_server, prompts, settings, args.concurrency)
    reports = {url: measure_server(server, prompts, settings, args.concurrency) for url, server in servers.items()}
    plot_servers(reports, folder / "acceptance.png")
    figures = {"plain_tokens_per_second": plain, "servers": {url: server_result(r) for url, r in reports.items()}}
    return server_markdown(reports, plain), figures


def load_drafter(name: str, target: PreTrainedModel) -> DFlashDraftModel:
    """A drafter on the target's device and in its type, as a server runs it."""
    return DFlashDraftModel.from_pretrained(name).to(target.device, target.dtype).eval()


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
    low, high = report.bootstrap_interval()
    groups = {
        "by_source": report.groups(lambda prompt: prompt.source),
        "by_language": report.groups(lambda prompt: prompt.language),
    }
    return (
        {"interval": None if low != low else [low, high]}
        | {title: {name: part.summary() for name, part in parts.items()} for title, parts in groups.items()}
        | {"by_position": report.by_position(max(1, report.max_new_tokens // 16))}
        | report.to_dict()
    )


def settings_of(args: EvaluationArguments) -> dict[str, Any]:
    """The exact settings, with the releases that ran."""
    names = ("dflash_hf", "torch", "transformers")
    versions = {name: importlib.metadata.version(name) for name in names}
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return dataclasses.asdict(args) | {"versions": versions, "time": when}


if __name__ == "__main__":
    main()
