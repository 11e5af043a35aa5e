# SPDX-License-Identifier: Apache-2.0
"""`AutoConfig` and `AutoModel` for drafters, whose `model_type` is that of a plain Qwen3 model."""

import copy
import copyreg
from typing import Any

from transformers import AutoConfig, AutoModel
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .checkpoint_format import DFLASH2, DFLASH2_PART
from .configuration_dflash import DFlashDraftConfig
from .configuration_dflash2 import DFlash2DraftConfig
from .modeling_dflash import DFlashDraftModel
from .modeling_dflash2 import DFlash2DraftModel


def is_drafter(config_dict: dict[str, Any]) -> bool:
    """Whether the content of a `config.json` is that of a drafter in the layout of this package."""
    architectures = config_dict.get("architectures")
    own = {"DFlashDraftModel", DFLASH2, DFLASH2_PART}
    return not own.isdisjoint(architectures) if architectures else "dflash_config" in config_dict


class _StandsForQwen3Config(type):
    """Calls and instance checks of the class go to `Qwen3Config`, and it is pickled as `Qwen3Config`."""

    def __call__(cls, *args, **kwargs):
        return Qwen3Config(*args, **kwargs) if cls is _Qwen3ConfigReader else super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance):
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass):
        return issubclass(subclass, Qwen3Config) if cls is _Qwen3ConfigReader else super().__subclasscheck__(subclass)


class _Qwen3ConfigReader(Qwen3Config, metaclass=_StandsForQwen3Config):
    """Reads a `config.json` as a drafter's configuration where it is one, else as `Qwen3Config`."""

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        if cls is not _Qwen3ConfigReader:
            return super().from_dict(config_dict, **kwargs)
        return (DFlashDraftConfig if is_drafter(config_dict) else Qwen3Config).from_dict(config_dict, **kwargs)


def register_auto_classes() -> None:
    """Make `AutoConfig` and `AutoModel` read drafters as [`DFlashDraftConfig`] and [`DFlashDraftModel`].

    Called on import, unless the environment variable `DFLASH_HF_AUTO_CLASSES` is "0".
    """
    # On disk a drafter's model_type must stay "qwen3", since inference engines parse it. So the entry of "qwen3" is
    # replaced by a class that tells the two apart where a file is read, and that is Qwen3Config in all else, its
    # module included: transformers lets a class from elsewhere win over the configuration code that a Qwen3 checkpoint
    # brings along for trust_remote_code=True. Registering a second model class for Qwen3Config instead would leave
    # AutoConfig as it is, and break AutoModel.from_config for plain configurations without `architectures`.
    for name in ("__module__", "__name__", "__qualname__"):
        setattr(_Qwen3ConfigReader, name, getattr(Qwen3Config, name))
    copyreg.pickle(_StandsForQwen3Config, lambda _: (copy.copy, (Qwen3Config,)))
    AutoConfig.register("qwen3", _Qwen3ConfigReader, exist_ok=True)
    AutoModel.register(DFlashDraftConfig, DFlashDraftModel)
    AutoModel.register(DFlash2DraftConfig, DFlash2DraftModel)
