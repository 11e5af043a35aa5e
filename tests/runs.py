# SPDX-License-Identifier: Apache-2.0
"""Short training runs in processes of their own, which can be killed: forked from one server that has imported all."""

import logging
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from killing import clean_context
from tiny import MASK_TOKEN_ID, dense_target
from transformers import TrainerCallback

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments


BLOCK_SIZE = 4


def make_documents(count: int = 16, shortest: int = 17, longest: int = 30, silent: tuple[int, ...] = ()) -> list[dict]:
    """Documents of random lengths with two answers; no two of them fit into one row of 32 tokens."""
    generator = np.random.default_rng(0)
    documents = []
    for index in range(count):
        length = int(generator.integers(shortest, longest + 1))
        first = int(generator.integers(2, max(3, length // 2 - 2)))
        spans = [[first, first + 3], [first + 5, length]]
        ids = generator.integers(0, 256, length).tolist()
        documents.append({"input_ids": ids, "supervised_spans": [] if index in silent else spans})
    return documents


def make_trainer(folder, target=None, documents=None, drafter=None, callbacks=None, cls=DFlashTrainer, **overrides):
    """A trainer of a tiny drafter whose runs, with equal arguments, are equal."""
    target = dense_target() if target is None else target
    if drafter is None:
        torch.manual_seed(0)
        config = DFlashDraftConfig.from_target_config(
            target.config, num_hidden_layers=2, num_taps=2, mask_token_id=MASK_TOKEN_ID, block_size=BLOCK_SIZE
        )
        drafter = DFlashDraftModel(config)
    kwargs = {
        name: overrides.pop(name) for name in ("eval_dataset", "processing_class", "peft_config") if name in overrides
    }
    values = {
        "output_dir": str(folder),
        "row_length": 32,
        "num_anchors": 6,
        "max_anchors_per_row": 64,
        "max_steps": 60,
        "warmup_steps": 0,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 10,
        "use_cpu": True,
    }
    return cls(
        drafter,
        target,
        DFlashTrainingArguments(**{**values, **overrides}),
        train_dataset=make_documents() if documents is None else documents,
        callbacks=callbacks,
        **kwargs,
    )


class Progress(TrainerCallback):
    """Writes down each finished step, so that another process can wait for one, and makes steps last."""

    def __init__(self, path: Path, seconds: float = 0.0):
        self.path, self.seconds = path, seconds

    def on_step_end(self, args, state, control, **kwargs):
        self.path.write_text(str(state.global_step))
        time.sleep(self.seconds)


def train(folder: str, resume=None, seconds: float = 0.0, **arguments) -> None:
    """Target of a process: train to the end and save the weights as `final-<rank>.pt`."""
    path = Path(folder)
    rank = int(os.environ.get("RANK", 0))
    trainer = make_trainer(path / "run", callbacks=[Progress(path / f"step-{rank}", seconds)], **arguments)
    trainer.train(resume_from_checkpoint=resume)
    state = {name: parameter.detach().cpu().clone() for name, parameter in trainer.model.named_parameters()}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    torch.save({"parameters": state, "losses": losses}, path / f"final-{rank}.pt")
    if trainer.args.world_size > 1:
        PartialState().wait_for_everyone()
        PartialState().destroy_process_group()


def _enter(function, environment: dict[str, str], log: str, args: tuple, kwargs: dict) -> None:
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # The handler of a forked process still writes to the server's stream.
    for handler in logging.getLogger("transformers").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    torch.set_num_threads(1)
    function(*args, **kwargs)


def start(function, *args, world: int = 1, log: Path, environment: dict[str, str] | None = None, **kwargs) -> list:
    """Start a function in a process, or as several gloo ranks, its output going to a file."""
    # The server keeps the environment that it was started in.
    environments: list[dict[str, str]] = [{**os.environ, **(environment or {})} for _ in range(world)]
    if world > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank, own in enumerate(environments):
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
            own |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": str(world), "ACCELERATE_USE_CPU": "true"}
    context = clean_context()
    processes = [context.Process(target=_enter, args=(function, own, str(log), args, kwargs)) for own in environments]
    for process in processes:
        process.start()
    return processes


def finish(processes: list, timeout: float = 120) -> list[int]:
    """Wait for the processes and return their exit codes."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in processes]


def wait_for_step(folder: Path, step: int, processes: list, rank: int = 0, timeout: float = 120) -> None:
    """Wait until a run in a process has finished a step."""
    path, deadline = folder / f"step-{rank}", time.monotonic() + timeout
    while time.monotonic() < deadline:
        text = path.read_text() if path.exists() else ""
        if text and int(text) >= step:
            return
        assert all(process.is_alive() for process in processes), "a process ended early"
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached in {timeout} s")
