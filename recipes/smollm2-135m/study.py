# SPDX-License-Identifier: Apache-2.0
"""What makes a better drafter: many short runs in one process, over hidden states that are computed once.

    python recipes/smollm2-135m/study.py --data FOLDER [--runs 'ce,dpace*'] [--field value ...]

The runs stand in study_runs.yaml. Each finished one is a line of `results.jsonl` in the output folder, and is left out
when the study is started again; `table.md` and `study.png` show all of them. README.md says how to read them.
"""

import copy
import fnmatch
import json
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from get_target import get_smollm2
from study_data import MAX_LENGTH, read_documents, write_data
from study_facts import study_facts
from study_report import write_report
from study_training import Run, Study, convert_to_float8, train
from transformers import AutoConfig, HfArgumentParser

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.acceptance import DecodingSettings, measure_acceptance, walked_acceptance_length
from dflash_hf.frozen_target import FrozenTarget
from dflash_hf.model_card import write_facts
from dflash_hf.trainer import compile_layers


HERE = Path(__file__).resolve().parent
# Walks, weights and compilation of a run, on an H200.
OTHER_SECONDS = 20.0
# What all runs of a folder share, and their names do not say.
OF_A_FOLDER = ("num_layers", "num_taps", "num_heads", "num_key_value_heads", "head_dim", "intermediate_size")
OF_A_FOLDER += ("block_size", "mask_token_id", "float8", "num_train", "num_dev")


@dataclass
class StudyArguments:
    """Target, data, which runs, and the drafter's shape."""

    data: str = field(metadata={"help": "Folder with the chats, or the file that study_data.py made of them."})
    target: str | None = field(default=None, metadata={"help": "Folder with the target; fetched if unset."})
    output_dir: str = field(
        default="outputs/study", metadata={"help": "Folder of results.jsonl, table.md, study.png."}
    )
    table: str = field(default=str(HERE / "study_runs.yaml"), metadata={"help": "The runs, by name."})
    runs: str = field(default="*", metadata={"help": "Names of runs, with * and ?, separated by commas."})
    extra: str = field(default="{}", metadata={"help": "Further runs as YAML: '{name: {objective: kl}}'."})
    seeds: str | None = field(default=None, metadata={"help": "Seeds for all runs in place of their own: '0,1,2'."})
    steps: int | None = field(default=None, metadata={"help": "Steps of all runs in place of their own."})
    max_minutes: float = field(default=9.0, metadata={"help": "Start no run that would end later."})
    list_runs: bool = field(default=False, metadata={"help": "Show the runs and end."})
    decode_prompts: int = field(default=0, metadata={"help": "Prompts to decode after each run, beside the walk."})
    decode_tokens: int = field(default=64, metadata={"help": "Tokens to decode per prompt."})
    decode_temperature: float = field(default=0.0, metadata={"help": "Temperature to decode with; 0 is greedy."})
    save_drafters: bool = field(default=False, metadata={"help": "Save each run's drafter in bf16."})
    num_layers: int = field(default=5, metadata={"help": "Layers of the drafter."})
    num_taps: int = field(default=5, metadata={"help": "Target layers that it reads."})
    num_heads: int = field(default=9, metadata={"help": "Attention heads."})
    num_key_value_heads: int = field(default=3, metadata={"help": "Heads of keys and values."})
    head_dim: int = field(default=64, metadata={"help": "Size of a head."})
    intermediate_size: int = field(default=1536, metadata={"help": "Size of the MLP."})
    block_size: int = field(default=16, metadata={"help": "Slots per block."})
    mask_token_id: int = field(default=15, metadata={"help": "Token id of a slot to be drafted."})
    float8: bool = field(
        default=False,
        metadata={"help": "Train and walk with the layers' products in fp8; give an output_dir of its own."},
    )
    dev_rows: int = field(default=16, metadata={"help": "Rows of 1,024 tokens that are walked together."})
    num_train: int | None = field(default=None, metadata={"help": "Training documents to use; all by default."})
    num_dev: int | None = field(default=None, metadata={"help": "Documents to walk; all by default."})


def main() -> None:
    arguments = HfArgumentParser(StudyArguments).parse_args_into_dataclasses()[0]
    begin = time.perf_counter()
    output_dir = Path(arguments.output_dir)
    results_file = output_dir / "results.jsonl"
    done = read_results(results_file)
    shared = {name: vars(arguments)[name] for name in OF_A_FOLDER}
    refuse_other_studies(output_dir, done, shared)
    runs = [run for run in select_runs(arguments) if run.key not in {key_of(result) for result in done}]
    if arguments.list_runs or not runs:
        print("\n".join(f"{run.key}: {run.reason}" for run in runs) or "Every run that was asked for is done.")
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    arguments.target = str(get_smollm2(arguments.target))
    study = load_study(arguments)
    print(f"Everything is loaded after {time.perf_counter() - begin:.0f} s.", flush=True)
    for run in runs:
        expected = expected_seconds(run, done)
        if time.perf_counter() - begin + expected > 60 * arguments.max_minutes:
            print(f"{run.key} is left for the next call: it would end after {arguments.max_minutes} minutes.")
            continue
        started = time.perf_counter()
        result = train(study, run) | {"shared": shared}
        if arguments.save_drafters:
            folder = output_dir / f"drafter-{run.key}"
            study.drafter.save_pretrained(folder, dtype=torch.bfloat16)
            write_facts(study_facts(result), folder)
        if arguments.decode_prompts:
            result |= decode(study, arguments)
        result["seconds"] = time.perf_counter() - started
        done.append(result)
        with results_file.open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        write_report(done, output_dir)
    print((output_dir / "table.md").read_text() if done else "No run was finished.")
    print(f"{time.perf_counter() - begin:.0f} s in all; results are in {output_dir}.")


def select_runs(arguments: StudyArguments) -> list[Run]:
    """The runs that the command line asks for, one per seed, in the order of the table.

    Raises:
        ValueError: For an unknown field, or a name that fits no run.
    """
    table = yaml.safe_load(Path(arguments.table).read_text()) | (yaml.safe_load(arguments.extra) or {})
    known = {f.name for f in fields(Run)} | {"seeds"}
    patterns = [pattern.strip() for pattern in arguments.runs.split(",")]
    unused = [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in table)]
    if unused:
        raise ValueError(f"--runs names {', '.join(unused)}, which no run is called; there are {', '.join(table)}.")
    runs = []
    for name, values in table.items():
        values = dict(values or {})
        if not values.keys() <= known:
            raise ValueError(f"Run {name} has the fields {sorted(values.keys() - known)}; known are {sorted(known)}.")
        seeds = values.pop("seeds", [0])
        if arguments.seeds is not None:
            seeds = [int(seed) for seed in arguments.seeds.split(",")]
        run = Run(name=name, **values)
        if arguments.steps is not None:
            run = replace(run, steps=arguments.steps)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            runs += [replace(run, seed=seed) for seed in seeds]
    return runs


def load_study(arguments: StudyArguments) -> Study:
    """Target, drafter and hidden states on the GPU, or on the CPU where there is none."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.type == "cuda"
    # Objectives, shapes and modes are each a graph of the same functions.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    data = Path(arguments.data)
    if data.is_dir():
        data = Path(arguments.output_dir) / "study.npz"
        write_data(Path(arguments.data), arguments.target, data, MAX_LENGTH)
    train_documents, dev = (read_documents(data, split) for split in ("train", "dev_greedy"))
    config = drafter_config(arguments)
    target = FrozenTarget(
        arguments.target,
        config.target_layer_ids or [],
        device=device,
        compile_target=True,
        final_states=True,
        dtype=torch.bfloat16 if on_cuda else torch.float32,
    )
    drafter = DFlashDraftModel(config).to(device)
    drafter.set_attn_implementation("flex_attention" if on_cuda else "sdpa")
    if arguments.float8:
        convert_to_float8(drafter, on_cuda)
    if on_cuda:
        compile_layers(drafter)
    print(f"Drafter: {drafter.num_parameters() / 1e6:.1f}M parameters, taps {config.target_layer_ids}.")
    train_documents, dev = train_documents[: arguments.num_train], dev[: arguments.num_dev]
    study = Study(target, drafter, train_documents, dev, device, dev_rows=arguments.dev_rows)
    size = study.train_features.num_bytes + study.dev_features.num_bytes
    print(f"Hidden states of {study.train_features.padding} training tokens: {size / 2**30:.1f} GiB.")
    return study


def drafter_config(arguments: StudyArguments) -> DFlashDraftConfig:
    return DFlashDraftConfig.from_target_config(
        AutoConfig.from_pretrained(arguments.target),
        num_taps=arguments.num_taps,
        num_hidden_layers=arguments.num_layers,
        num_attention_heads=arguments.num_heads,
        num_key_value_heads=arguments.num_key_value_heads,
        head_dim=arguments.head_dim,
        intermediate_size=arguments.intermediate_size,
        block_size=arguments.block_size,
        mask_token_id=arguments.mask_token_id,
    )


def decode(study: Study, arguments: StudyArguments) -> dict[str, Any]:
    """Real decoding of some prompts, in the target's type, and the walk over the answers that come out."""
    target, dtype = study.target.model, next(study.target.model.parameters()).dtype
    # Of its own, since the attention of the one that trains is named in its configuration.
    drafter = DFlashDraftModel(copy.deepcopy(study.config)).to(study.device, dtype)
    drafter.load_state_dict(study.drafter.state_dict())
    drafter.set_attn_implementation("sdpa")
    drafter.eval()
    prompts = [d["input_ids"][: d["supervised_spans"][0][0]].tolist() for d in study.dev[: arguments.decode_prompts]]
    settings = DecodingSettings(arguments.decode_tokens, temperature=arguments.decode_temperature)
    report = measure_acceptance(target, drafter, prompts, settings=settings)
    walked = walked_acceptance_length(target, drafter, report, progress=False)
    print(f"{len(prompts)} prompts decoded: tau {report.acceptance_length:.3f}, by the walk {walked}.")
    return {
        "decoded_acceptance_length": report.acceptance_length,
        "walked_acceptance_length": walked,
        "decoded_prompts": len(prompts),
        "decode_temperature": settings.temperature,
        "lossless": report.lossless,
        "speedup": report.tokens_per_second / report.plain_tokens_per_second,
    }


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def refuse_other_studies(output_dir: Path, done: list[dict[str, Any]], shared: dict[str, Any]) -> None:
    """End where a folder's runs are of another drafter or other data, and would be taken for those asked for."""
    for result in done:
        # Files of earlier versions do not say it.
        theirs = result.get("shared", shared)
        others = [f"{name} {theirs[name]} (now {value})" for name, value in shared.items() if theirs[name] != value]
        if others:
            raise SystemExit(
                f"The runs in {output_dir} have {', '.join(others)}. Give another --output_dir, or the same options."
            )


def key_of(result: dict[str, Any]) -> str:
    return f"{result['name']}-s{result['seed']}-{result['steps']}"


def expected_seconds(run: Run, done: list[dict[str, Any]]) -> float:
    """By the slowest run so far, with time for the walks and a compilation; 0 before there is one."""
    slowest = max((result["seconds_per_step"] for result in done), default=0.0)
    return 0.0 if not done else slowest * run.steps + OTHER_SECONDS


if __name__ == "__main__":
    main()
