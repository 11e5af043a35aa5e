# SPDX-License-Identifier: Apache-2.0
"""A long run grows in nothing: memory, threads, hooks, open files, files on the disk."""

import gc
import json
import os
import threading
import time
from pathlib import Path

import pytest
from runs import finish, make_documents, make_trainer, start
from transformers import TrainerCallback


STEPS, FIRST = 2000, 200


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Measure(TrainerCallback):
    """Writes down what there is at some steps."""

    def __init__(self, path: Path):
        self.path, self.figures, self.begin = path, {}, time.monotonic()

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step % FIRST or not state.global_step:
            return
        gc.collect()
        modules = list(model.modules())
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules)
        inner = optimizer.optimizer
        self.figures[state.global_step] = {
            "memory": resident_bytes(),
            "threads": threading.active_count(),
            "hooks": hooks + len(inner._optimizer_step_pre_hooks) + len(inner._optimizer_step_post_hooks),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "files": sum(len(files) for _, _, files in os.walk(args.output_dir)),
            "seconds": time.monotonic() - self.begin,
        }
        self.path.write_text(json.dumps(self.figures))


def soak(folder: str) -> None:
    """Target of a process."""
    path = Path(folder)
    trainer = make_trainer(
        path / "run",
        callbacks=[Measure(path / "figures.json")],
        max_steps=STEPS + 1,
        save_steps=50,
        save_total_limit=2,
        eval_dataset=make_documents(2),
        eval_strategy="steps",
        eval_steps=50,
        logging_steps=10,
        remote_checkpoint_dir="file://" + str(path / "mirror"),
        context_noise=0.05,
    )
    trainer.train()


@pytest.mark.slow
def test_nothing_grows_in_2000_steps(tmp_path):
    processes = start(soak, str(tmp_path), log=tmp_path / "log")
    assert finish(processes, timeout=3000) == [0], (tmp_path / "log").read_text()[-2000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    first, last = figures[str(FIRST)], figures[str(STEPS)]
    print(json.dumps(figures, indent=1))
    assert last["memory"] < 1.03 * first["memory"]
    assert last["threads"] <= first["threads"] and last["hooks"] <= first["hooks"]
    # A checkpoint may be on its way at either moment.
    assert last["descriptors"] <= first["descriptors"] + 2
    assert last["files"] <= first["files"] + 20
