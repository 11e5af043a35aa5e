# SPDX-License-Identifier: Apache-2.0
"""The frozen target: from packed token ids to the hidden states that a drafter reads.

Shapes: B rows, T packed tokens, K taps, D hidden size.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_dflash import DFlashDraftConfig
from .checks import check_fits, check_taps, decoder_layers, refuse_slow
from .compiled import refuse_ahead
from .dense import PackedDense
from .features import PackedForward, packed_features, padded_features
from .head import COMPUTE_TYPES, is_on
from .kernel_cache import keep_tuned_kernels
from .kernels import transformers_delta_rule
from .loading import eos_token_ids, take_model
from .packing import Piece, document_pieces
from .qwen3_5 import PackedQwen35
from .startup_check import packing_fault
from .startup_times import StartupTimes
from .tapping import read_taps
from .varied_lengths import varied_lengths


logger = logging.getLogger(__name__)


class FrozenTarget:
    """A causal language model that only ever gives hidden states to a drafter.

    It is not an `nn.Module`, so that no trainer moves, saves or optimises it.

    Args:
        model (`str`, `Path` or `PreTrainedModel`):
            Hub id or folder, loaded by `AutoModelForCausalLM` and cut after the last tap, or a loaded model, which is
            frozen but keeps all its layers.
        target_layer_ids (`list[int]`): Taps: 0-based decoder layers whose outputs are read.
        device: Where the target runs; None leaves it where it is.
        packed (`bool`, *optional*):
            Whether documents may share a row of the target's forward, where its layers allow it and after a check at
            the first call; by default on CUDA.
        compile_target: Whether to compile, on CUDA, the layers of a Qwen3.5/3.6 target, which takes up to a minute
            (quantised ones are left as they are), or the attention of other targets over packed documents, which
            takes some seconds and is what makes small targets fast.
        allow_slow_target: Whether a hybrid target may run on CUDA without flash-linear-attention.
        final_states: Whether all layers are kept and run, for objectives that compare with the target's distribution.
        **init_kwargs: Arguments of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        OSError: When there is no such model.
        ValueError: When a tap is out of range, or a hybrid target would be far too slow.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        target_layer_ids: Sequence[int],
        device: torch.device | str | None = None,
        packed: bool | None = None,
        compile_target: bool = False,
        allow_slow_target: bool = False,
        final_states: bool = False,
        **init_kwargs,
    ):
        self.startup = StartupTimes()
        self.startup.begin("load_target")
        # A model of the user's keeps all its layers; one loaded here is nobody else's.
        owned = isinstance(model, str | Path)
        self.model: Any = take_model(model, device, allow_slow_target, init_kwargs)
        self.config: PreTrainedConfig = self.model.config.get_text_config(decoder=True)
        self.target_layer_ids = list(target_layer_ids)
        self.layers: nn.ModuleList = decoder_layers(self.model)
        check_taps(self.target_layer_ids, len(self.layers))
        self.final_states = final_states
        if owned and not final_states:
            del self.layers[self.target_layer_ids[-1] + 1 :]
        self.model.requires_grad_(False).eval()
        devices = {p.device for p in self.model.parameters()}
        # A target that from_pretrained spread over several devices stays where it is.
        if device is not None and len(devices) == 1 and not is_on(next(self.model.parameters()), device):
            self.model.to(device)  # type: ignore[arg-type]
        on_cuda = self.device.type == "cuda"
        if on_cuda and not allow_slow_target:
            refuse_slow(self.config)
        self._vocab_size: int = self.config.vocab_size
        self._lock = Lock()
        self._packed: PackedForward | None = None
        self._unchecked: PackedForward | None = None
        if (on_cuda if packed is None else packed) and len(devices) == 1:
            self._unchecked = self._packable(compile_target and on_cuda)
        self._kernel_folder = keep_tuned_kernels() if on_cuda and isinstance(self._unchecked, PackedQwen35) else None
        self.startup.end("load_target", self.device)

    def _packable(self, compiled: bool) -> PackedForward | None:
        """The packed path that this target's layers have, to be checked at the first call."""
        decoder = self.model.get_decoder()
        if PackedQwen35.fits(decoder):
            compiled = compiled and not _quantised(self.model)
            return PackedQwen35(decoder, self.target_layer_ids, compiled, final_states=self.final_states)
        compiled = compiled and PackedDense.compiles(decoder)
        if compiled or PackedDense.fits(decoder):
            return PackedDense(decoder, self._read_taps, compiled)
        self._say_padded(
            "only Qwen3.5/3.6 layers, full attention by sdpa and, compiled on a GPU, sliding attention are packed"
        )
        return None

    def _say_padded(self, reason: str) -> None:
        logger.warning(
            "Documents cannot share a row of this %s: %s. Each runs in a row of its own instead, which is right and "
            "slower.",
            type(self.model).__name__,
            reason,
        )

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids after which the target stops generating, by its generation config."""
        return eos_token_ids(self.model.generation_config)

    def tuning_notice(self) -> str | None:
        """What to tell whoever waits for the first forward, if that compiles and tunes."""
        if self._unchecked is None or self.device.type != "cuda" or not isinstance(self._unchecked, PackedQwen35):
            return None
        kept = "at each launch" if self._kernel_folder is None else f"once per machine (kept in {self._kernel_folder})"
        return (
            "The target's layers are compiled and its kernels tuned before the first step: a minute or two, "
            f"{kept}; the log says what each part took."
        )

    def check_drafter(self, config: DFlashDraftConfig) -> None:
        """Refuse a drafter that was made for another target.

        Raises:
            ValueError: Naming the field, both values and the way out.
        """
        check_fits(config, self.config, self.model.get_input_embeddings().weight.shape[0])
        if config.target_layer_ids != self.target_layer_ids:
            raise ValueError(
                f"The drafter's target_layer_ids is {config.target_layer_ids}, the FrozenTarget's is "
                f"{self.target_layer_ids}. Make the FrozenTarget with the drafter's config.target_layer_ids."
            )

    @torch.no_grad()
    def context_hidden_states(
        self, input_ids: torch.Tensor, document_lengths: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """Outputs of the tapped layers for packed rows, each document as if it were alone.

        Where the target can be packed, documents run one after another in one row, and every mixing layer gets their
        borders. Elsewhere they run one per right-padded row without attention mask or position ids: padding on the
        right changes nothing before it. Either way no state of a linear-attention layer crosses a border. On a GPU
        nothing waits for the device after the first call, so that a worker thread can run ahead.

        Args:
            input_ids (`torch.Tensor` of shape `[B, T]`): Packed token ids.
            document_lengths: Lengths in tokens of the documents of each row, in order; None for one document per
                row that fills it.

        Returns:
            `torch.Tensor` of shape `[B, T, K * D]` on the target's device; zeros where no document is.
        """
        return self.split(self.all_hidden_states(input_ids, document_lengths))[0]

    @torch.no_grad()
    def all_hidden_states(
        self, input_ids: torch.Tensor, document_lengths: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """[`context_hidden_states`], and with `final_states` the states after the target's final norm behind them.

        Args:
            input_ids, document_lengths: As for [`context_hidden_states`].

        Returns:
            `torch.Tensor` of shape `[B, T, K * D]`, or `[B, T, (K + 1) * D]` with `final_states`.
        """
        rows, width = input_ids.shape
        if document_lengths is None:
            document_lengths = [[width]] * rows
        pieces = document_pieces(document_lengths, width)
        if not pieces:
            raise ValueError("The batch holds no document; give rows with at least one document of one token.")
        input_ids = input_ids.to(self.device, non_blocking=True)
        # Under the drafter's autocast a document's features would depend on who asks for them, and what is compiled
        # would fit one thread alone.
        with torch.autocast(self.device.type, enabled=False, cache_enabled=True), varied_lengths():
            packed = self._checked_packing(rows * width)
            self.startup.begin("first_target_forward")
            states = self._features(packed, input_ids, pieces)
        self.startup.end("first_target_forward", states.device)
        return states

    def split(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What [`all_hidden_states`] gives, in parts: the context, and the final states or None."""
        if not self.final_states:
            return states, None
        return states[..., : -self.config.hidden_size], states[..., -self.config.hidden_size :]

    def _features(self, packed: PackedForward | None, input_ids: torch.Tensor, pieces: list[Piece]) -> torch.Tensor:
        if packed is None:
            return padded_features(self._read_taps, input_ids, pieces)
        return packed_features(packed, input_ids, pieces)

    def _read_taps(self, **inputs) -> list[torch.Tensor]:
        return read_taps(self.model.get_decoder(), self.layers, self.target_layer_ids, self.final_states, **inputs)

    def _checked_packing(self, tokens: int) -> PackedForward | None:
        """The packed path, if there is one that passes the check of the first call."""
        if self._unchecked is not None:
            # It compiles; and a thread that is ahead must not wait for the one that is in it.
            refuse_ahead("The check of the target")
        with self._lock:
            if self._unchecked is not None:
                packed = self._unchecked
                self.startup.begin("check_target")
                with self._few_layers(packed), transformers_delta_rule():
                    reader, reference = partial(self._tuned_features_of, packed), partial(self._features_of, None)
                    fault = packing_fault(reader, reference, self.target_layer_ids, self._vocab_size, tokens)
                self.startup.end("check_target", self.device)
                if fault is None:
                    self._packed = packed
                else:
                    self._say_padded(fault)
                self._unchecked = None
        return self._packed

    def _tuned_features_of(
        self, packed: PackedForward, input_ids: torch.Tensor, document_lengths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """[`_features_of`], whose first call compiles and tunes."""
        self.startup.begin("tune_target")
        states = self._features_of(packed, input_ids, document_lengths)
        self.startup.end("tune_target", states.device)
        return states

    def _features_of(
        self, packed: PackedForward | None, input_ids: torch.Tensor, document_lengths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        pieces = document_pieces(document_lengths, input_ids.shape[1])
        return self.split(self._features(packed, input_ids.to(self.device), pieces))[0]

    @contextmanager
    def _few_layers(self, packed: PackedForward) -> Iterator[None]:
        """Taps no deeper than one layer of each kind: all others run the same kernels, and the check is quicker."""
        if not isinstance(packed, PackedQwen35):
            yield
            return
        taps, final_states = self.target_layer_ids, self.final_states
        kinds = [layer.block_type for layer in self.layers[: taps[-1] + 1]]
        self.target_layer_ids = packed.target_layer_ids = [max(kinds.index(kind) for kind in set(kinds))]
        self.final_states = packed.final_states = False
        try:
            yield
        finally:
            self.final_states = packed.final_states = final_states
            self.target_layer_ids, packed.target_layer_ids = taps, list(taps)


class FullDepth:
    """A [`FrozenTarget`] whose final states travel with its context, as one tensor.

    Args:
        target: A target with `final_states`.
    """

    def __init__(self, target: FrozenTarget):
        self.target = target

    @property
    def device(self) -> torch.device:
        return self.target.device

    def context_hidden_states(
        self, input_ids: torch.Tensor, document_lengths: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """[`FrozenTarget.all_hidden_states`]."""
        return self.target.all_hidden_states(input_ids, document_lengths)


def _quantised(model: Any) -> bool:
    """Whether a compiler would meet layers or weights that are not torch's own."""
    plain = all(type(p) is nn.Parameter and p.dtype in COMPUTE_TYPES for p in model.parameters())
    return not plain or "quantization_config" in model.config.to_dict()


__all__ = ["FrozenTarget", "FullDepth"]
