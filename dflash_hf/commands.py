# SPDX-License-Identifier: Apache-2.0
"""`dflash-hf COMMAND ...`: the commands, and the start of several processes by accelerate."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import yaml

from . import __version__


CONFIGS = Path(__file__).parent / "accelerate_configs"
COMMANDS = {
    "train": "train a drafter for a target, or continue one",
    "plan": "say what training will need: devices, memory, hours; with --preflight true, try it out",
    "tokenize": "chats to documents that training reads",
    "generate": "let the target answer prompts, for a drafter to learn from",
    "evaluate": "measure the acceptance length and the speed-up",
    "adapt": "adapt a trained drafter to chats of your own",
    "publish": "push a drafter to the Hub, with its card",
    "validate": "check that engines will read a drafter as it was trained",
}
# These may be started as several processes.
LAUNCHED = ("train", "plan", "adapt")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (by default the process's words) names; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(f"dflash_hf {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        rows = [f"  {name:<10} {what}" for name, what in COMMANDS.items()]
        print("usage: dflash-hf COMMAND [--config FILE.yaml] [--field value ...]\n", *rows, sep="\n")
        print("\n`dflash-hf COMMAND --help` lists a command's options; `dflash-hf --version` prints the version.")
        return 0 if words else 2
    command, options = words[0], words[1:]
    if command not in COMMANDS:
        print(f"dflash-hf: error: there is no command {command!r}; expected {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    if command in LAUNCHED:
        options = launch(command, options)
    return _function(command)(options) or 0


def launch(command: str, options: list[str]) -> list[str]:
    """Start the processes of `--accelerate_config`; returns the other options where this process is the only one.

    For several processes accelerate's launcher takes this one's place, so that signals reach it.
    """
    names = [word.split("=")[0].replace("-", "_") for word in options]
    if "__accelerate_config" not in names:
        return options
    at = names.index("__accelerate_config")
    _, is_joined, name = options[at].partition("=")
    rest = options[:at] + options[at + (1 if is_joined else 2) :]
    name = name if is_joined else "".join(options[at + 1 : at + 2])
    known = {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}
    config = known.get(name, Path(name))
    if not config.is_file():
        raise SystemExit(
            f"dflash-hf {command}: error: accelerate_config is {name!r}; expected a file or one of {', '.join(known)}."
        )
    values = {"num_processes": 1, "gpu_ids": "all", "use_cpu": False} | (yaml.safe_load(config.read_text()) or {})
    if values["num_processes"] > 1:
        words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "-m"]
        os.execv(sys.executable, [*words, "dflash_hf.commands", command, *rest])
    # accelerate's launcher would start one more process, and not pass signals on to it.
    if values["gpu_ids"] != "all":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(values["gpu_ids"])
    os.environ["ACCELERATE_USE_CPU"] = str(values["use_cpu"]).lower()
    return rest


def _function(command: str) -> Callable[[Sequence[str]], int | None]:
    # Each command imports only what it needs.
    match command:
        case "train" | "plan":
            from .command_train import main as train

            return partial(train, plan=command == "plan")
        case "tokenize":
            from .command_tokenize import main as tokenize

            return tokenize
        case "generate":
            from .command_generate import main as generate

            return generate
        case "evaluate":
            from .command_evaluate import main as evaluate

            return evaluate
        case "adapt":
            from .command_adapt import main as adapt

            return adapt
        case "publish":
            from .publishing import main as publish

            return publish
        case _:
            from .validation import main as validate

            return validate


if __name__ == "__main__":
    sys.exit(main())
