# SPDX-License-Identifier: Apache-2.0
"""Calls on plain Qwen3 models whose results `import dflash_hf` must not change; run as a script in its own process.

    python auto_class_table.py FOLDER [--import]

prints the results as one JSON object, warnings and log lines included.
"""

import copy
import json
import logging
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlavaConfig,
    Qwen3Config,
    Qwen3OmniMoeConfig,
)


def described(result: Any) -> Any:
    """What can be compared between two processes."""
    if isinstance(result, transformers.PreTrainedConfig):
        subconfigs = {k: described(v) for k, v in vars(result).items() if isinstance(v, transformers.PreTrainedConfig)}
        return [type(result).__module__, type(result).__qualname__, result.to_json_string(), repr(result), subconfigs]
    if isinstance(result, torch.nn.Module):
        total = sum(parameter.double().sum().item() for parameter in result.parameters())
        return [type(result).__module__, type(result).__qualname__, total, described(result.config)]
    if isinstance(result, type):
        return [result.__module__, result.__qualname__, result.__name__]
    return result if isinstance(result, str | bool | list | dict) else repr(type(result))


def saved(thing: Any, folder: Path) -> dict[str, str]:
    thing.save_pretrained(folder)
    return {path.name: path.read_text() if path.suffix == ".json" else "" for path in sorted(folder.iterdir())}


def calls(folder: Path) -> dict[str, Any]:
    """Name -> a call without arguments."""
    plain, coded = folder / "plain", folder / "coded"
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 99}
    config = Qwen3Config.from_pretrained(plain)
    no_architectures = Qwen3Config.from_dict({**config.to_dict(), "architectures": None})
    text = {"model_type": "qwen3", **tiny}
    table: dict[str, Any] = {
        "for_model": lambda: AutoConfig.for_model("qwen3", **tiny),
        "for_model_bad": lambda: AutoConfig.for_model("qwen3", hidden_size="x"),
        "mapping": lambda: CONFIG_MAPPING["qwen3"],
        "mapping_call": lambda: CONFIG_MAPPING["qwen3"](**tiny),
        "mapping_from_dict": lambda: CONFIG_MAPPING["qwen3"].from_dict(
            dict(tiny), unknown=1, return_unused_kwargs=True
        )[0],
        "mapping_from_pretrained": lambda: CONFIG_MAPPING["qwen3"].from_pretrained(plain, num_hidden_layers=3),
        "mapping_pickled": lambda: pickle.loads(pickle.dumps(CONFIG_MAPPING))["qwen3"],
        "mapping_copied": lambda: copy.deepcopy(CONFIG_MAPPING)["qwen3"],
        "mapping_keys": lambda: sorted(set(CONFIG_MAPPING.keys())),
        "classes": lambda: [
            type(made) is Qwen3Config
            for made in (
                AutoConfig.for_model("qwen3", **tiny),
                CONFIG_MAPPING["qwen3"](**tiny),
                AutoConfig.from_pretrained(plain),
                LlavaConfig(text_config=dict(text)).text_config,
                pickle.loads(pickle.dumps(AutoConfig.for_model("qwen3", **tiny))),
            )
        ],
        "isinstance": lambda: isinstance(config, CONFIG_MAPPING["qwen3"]),
        "not_isinstance": lambda: isinstance(transformers.LlamaConfig(), CONFIG_MAPPING["qwen3"]),
        "issubclass": lambda: issubclass(Qwen3Config, CONFIG_MAPPING["qwen3"]),
        "subclass": lambda: type("Own", (CONFIG_MAPPING["qwen3"],), {})(**tiny),
        "pickled": lambda: pickle.loads(pickle.dumps(AutoConfig.from_pretrained(plain))),
        "copied": lambda: copy.deepcopy(AutoConfig.from_pretrained(plain)),
        "config_saved": lambda: saved(AutoConfig.from_pretrained(plain), folder / "out_config"),
        "model_saved": lambda: saved(AutoModel.from_pretrained(plain), folder / "out_model"),
        "from_config": lambda: seeded(AutoModel.from_config, no_architectures),
        "from_config_causal": lambda: seeded(AutoModelForCausalLM.from_config, no_architectures),
        "from_config_classifier": lambda: seeded(AutoModelForSequenceClassification.from_config, config),
        "from_config_trust": lambda: seeded(AutoModel.from_config, config, trust_remote_code=True),
        "tokenizer": lambda: [type(t := AutoTokenizer.from_pretrained(plain)).__qualname__, t("hello")["input_ids"]],
        "config_file": lambda: AutoConfig.from_pretrained(plain / "config.json"),
        "override": lambda: AutoConfig.from_pretrained(plain, num_hidden_layers=7, attn_implementation="eager"),
        "no_such_folder": lambda: AutoConfig.from_pretrained(str(folder / "nowhere")),
        "composite": lambda: LlavaConfig(text_config=dict(text)),
        "composite_from_dict": lambda: LlavaConfig.from_dict(LlavaConfig(text_config=dict(text)).to_dict()),
        "composite_saved": lambda: saved(LlavaConfig(text_config=dict(text)), folder / "out_composite"),
        "composite_auto": lambda: AutoConfig.from_pretrained(folder / "out_composite"),
        "omni": lambda: Qwen3OmniMoeConfig(),
        # A field of the drafters' in a plain configuration is no drafter.
        "block_size": lambda: CONFIG_MAPPING["qwen3"](block_size=16, dflash_config={"mask_token_id": 1}, **tiny),
        "other_drafter": lambda: AutoConfig.from_pretrained(folder / "dflash2"),
    }
    for trust in (None, True, False):
        for name, where in (("plain", plain), ("coded", coded)):
            table |= {
                f"{name}_config_{trust}": lambda w=where, t=trust: AutoConfig.from_pretrained(w, trust_remote_code=t),
                f"{name}_model_{trust}": lambda w=where, t=trust: AutoModel.from_pretrained(w, trust_remote_code=t),
                f"{name}_causal_{trust}": lambda w=where, t=trust: AutoModelForCausalLM.from_pretrained(
                    w, trust_remote_code=t, dtype=torch.float16
                ),
            }
    return table


def seeded(function, *args, **kwargs):
    torch.manual_seed(0)
    return function(*args, **kwargs)


def run(call) -> dict[str, Any]:
    """The result or the error of a call, and what it said."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = described(call())
        except Exception as error:  # the error is a result that is compared
            result = [type(error).__qualname__, str(error)]
    logger.removeHandler(handler)
    said = [str(warning.message) for warning in caught if not issubclass(warning.category, ResourceWarning)]
    return {"result": result, "log": lines, "warnings": said}


if __name__ == "__main__":
    if "--import" in sys.argv:
        import dflash_hf  # noqa: F401
    print(json.dumps({name: run(call) for name, call in calls(Path(sys.argv[1])).items()}))
