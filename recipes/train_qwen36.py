# SPDX-License-Identifier: Apache-2.0
"""`dflash-hf train` for `accelerate launch`: by default the recipe of Qwen3.6-27B."""

from pathlib import Path

from dflash_hf.command_train import main


if __name__ == "__main__":
    main(default_config=Path(__file__).resolve().parent / "qwen3.6-27b" / "config.yaml")
