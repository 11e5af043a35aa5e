# SPDX-License-Identifier: Apache-2.0
"""The frozen target: from packed token ids to the hidden states that a drafter reads.

Shapes: B rows, T packed tokens, K taps, D hidden size, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .configuration_dflash import DFlashDraftConfig


# Documents run through the target together while padding stays below this share of the tokens.
MAX_PADDING = 0.05


class _LastTapRead(Exception):
    """Ends the target's forward: nothing after the last tap is needed."""


class FrozenHead:
    """The target's embedding and head on the drafter's device; a tied weight is held once.

    Args:
        target: The target model.
        device: Device of the drafter. Nothing is copied where the target is there already.
    """

    def __init__(self, target: PreTrainedModel, device: torch.device | str):
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        if head is None:
            raise ValueError(
                f"{type(target).__name__} has no output head (get_output_embeddings() is None), but the drafter's "
                "logits go through the target's head. Load the target with AutoModelForCausalLM."
            )
        # One deepcopy of both keeps a tied weight tied.
        pair = nn.ModuleList([embedding, head])
        if not all(_is_on(p, device) for p in pair.parameters()):
            pair = copy.deepcopy(pair).to(device)
        self.embedding, self.head = pair.requires_grad_(False)
        self.embedding_weight: torch.Tensor = self.embedding.get_parameter("weight")
        self.head_dtype: torch.dtype = self.head.get_parameter("weight").dtype
        self.vocab_size: int = self.embedding_weight.shape[0]
        self._transform = _logit_transform(target.config.get_text_config(decoder=True))

    def noise_embeds(self, anchor_token_ids: torch.Tensor, mask_token_id: int, block_size: int) -> torch.Tensor:
        """[`block_inputs`] from the target's embedding."""
        return block_inputs(self.embedding_weight, anchor_token_ids, mask_token_id, block_size)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V]` of the drafter's output `[..., D]`, multiplied in the type of the head.

        Where the target scales its logits or caps them softly, these are scaled and capped too.
        """
        return self._transform(self.head(hidden_states.to(self.head_dtype)))


def _logit_transform(config: PreTrainedConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a target does with its logits after the head, by the fields of its configuration that say so."""
    fields = config.to_dict()
    scale = (fields.get("logit_scale") or 1.0) / (fields.get("logits_scaling") or 1.0)
    cap = fields.get("final_logit_softcapping")

    def transform(logits: torch.Tensor) -> torch.Tensor:
        logits = logits if scale == 1.0 else logits * scale
        return logits if not cap else cap * torch.tanh(logits / cap)

    return transform


def block_inputs(
    embedding_weight: torch.Tensor, anchor_token_ids: torch.Tensor, mask_token_id: int, block_size: int
) -> torch.Tensor:
    """Raw embeddings of `[anchor, mask, ..., mask]` for every block.

    Args:
        embedding_weight (`torch.Tensor` of shape `[V, D]`): The target's embedding table.
        anchor_token_ids (`torch.Tensor` of shape `[B, N]`): Token at each anchor.
        mask_token_id: Token id of a slot to be drafted.
        block_size: Slots per block, `b`.

    Returns:
        `torch.Tensor` of shape `[B, N * b, D]`, without any norm or scale that the target puts on embeddings.
    """
    rows, num_anchors = anchor_token_ids.shape
    ids = anchor_token_ids.new_full((rows, num_anchors, block_size), mask_token_id)
    ids[..., 0] = anchor_token_ids
    return nn.functional.embedding(ids.flatten(1), embedding_weight)


class FrozenTarget:
    """A causal language model that only ever gives hidden states to a drafter.

    It is not an `nn.Module`, so that no trainer moves, saves or optimises it.

    Args:
        model (`str`, `Path` or `PreTrainedModel`):
            Hub id or folder, loaded by `AutoModelForCausalLM` and cut after the last tap, or a loaded model, which is
            frozen but keeps all its layers.
        target_layer_ids (`list[int]`): Taps: 0-based decoder layers whose outputs are read.
        device: Where the target runs; None leaves it where it is.
        **init_kwargs: Arguments of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        OSError: When there is no such model.
        ValueError: When a tap is out of range.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        target_layer_ids: Sequence[int],
        device: torch.device | str | None = None,
        **init_kwargs,
    ):
        if not isinstance(model, str | Path | nn.Module):
            raise TypeError(
                f"The target is a {type(model).__name__}; give a Hub id, a folder or a loaded causal language model."
            )
        if init_kwargs and isinstance(model, nn.Module):
            raise ValueError(
                f"target_model_init_kwargs={init_kwargs} were given together with a loaded target model: they are "
                "arguments of from_pretrained. Pass the target's id or folder, or leave them out."
            )
        # A model of the user's keeps all its layers; one loaded here is nobody else's.
        owned = isinstance(model, str | Path)
        self.model: Any = _load(model, init_kwargs) if isinstance(model, str | Path) else model
        if any(p.is_meta for p in self.model.parameters()):
            raise ValueError(
                f"The target {type(self.model).__name__} has parameters on the meta device, so it has no weights to "
                "run with. Load it with from_pretrained, without offloading."
            )
        self.config: PreTrainedConfig = self.model.config.get_text_config(decoder=True)
        self.target_layer_ids = list(target_layer_ids)
        self.layers: nn.ModuleList = _decoder_layers(self.model)
        self._check_taps()
        if owned:
            del self.layers[self.target_layer_ids[-1] + 1 :]
        self.model.requires_grad_(False).eval()
        devices = {p.device for p in self.model.parameters()}
        # A target that from_pretrained spread over several devices stays where it is.
        if device is not None and len(devices) == 1 and not _is_on(next(self.model.parameters()), device):
            self.model.to(device)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def eos_token_ids(self) -> list[int] | None:
        """Ids after which the target stops generating, by its generation config."""
        eos = self.model.generation_config.eos_token_id
        return [eos] if isinstance(eos, int) else eos

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

        Documents run one per right-padded row without attention mask or position ids: padding on the right changes
        nothing before it, and no state of a linear-attention layer crosses a document's border.

        Args:
            input_ids (`torch.Tensor` of shape `[B, T]`): Packed token ids.
            document_lengths: Lengths in tokens of the documents of each row, in order; None for one document per
                row that fills it.

        Returns:
            `torch.Tensor` of shape `[B, T, K * D]` on the target's device; zeros where no document is.
        """
        rows, width = input_ids.shape
        if document_lengths is None:
            document_lengths = [[width]] * rows
        input_ids = input_ids.to(self.device, non_blocking=True)
        pieces = _document_slices(document_lengths, width)
        output = None
        for group in _groups_of_similar_length(pieces):
            longest = max(length for _, _, length in group)
            padded = input_ids.new_zeros(len(group), longest)
            for i, (row, start, length) in enumerate(group):
                padded[i, :length] = input_ids[row, start : start + length]
            states = self._read_taps(padded)
            if output is None:
                output = states.new_zeros(rows, width, states.shape[-1])
            for i, (row, start, length) in enumerate(group):
                output[row, start : start + length] = states[i, :length]
        if output is None:
            raise ValueError("The batch holds no document; give rows with at least one document of one token.")
        return output

    def _read_taps(self, input_ids: torch.Tensor) -> torch.Tensor:
        with self._hooks() as taps, suppress(_LastTapRead):
            self.model.get_decoder()(input_ids=input_ids, use_cache=False)
        return torch.cat([taps[i] for i in self.target_layer_ids], dim=-1)

    @contextmanager
    def _hooks(self) -> Iterator[dict[int, torch.Tensor]]:
        """Hooks live only during a forward, so that a model shared with the user stays as it was."""
        taps: dict[int, torch.Tensor] = {}
        last = self.target_layer_ids[-1]

        def read(index: int):
            def hook(module, args, output):
                taps[index] = output[0] if isinstance(output, tuple) else output
                if index == last:
                    raise _LastTapRead

            return hook

        handles = [self.layers[i].register_forward_hook(read(i)) for i in self.target_layer_ids]
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()

    def _check_taps(self) -> None:
        taps, depth = self.target_layer_ids, len(self.layers)
        if not taps or any(b <= a for a, b in pairwise(taps)) or taps[0] < 0:
            raise ValueError(f"target_layer_ids={taps} must be layer indices, unique and ascending, at least one.")
        if taps[-1] >= depth - 1:
            raise ValueError(
                f"target_layer_ids={taps} must lie in 0..{depth - 2}: the target has {depth} layers and the last one "
                "is refused, since its entry in hidden_states is after the final norm while a hook sees it before."
            )


def check_fits(drafter_config: DFlashDraftConfig, target_config: PreTrainedConfig, embedding_rows: int) -> None:
    """Refuse a drafter that was made for another target.

    Args:
        drafter_config: The drafter's configuration.
        target_config: The target's configuration, text-only or multimodal.
        embedding_rows: Rows of the target's embedding.

    Raises:
        ValueError: Naming the field, both values and the way out.
    """
    mask = drafter_config.mask_token_id
    if mask is not None and mask >= embedding_rows:
        raise ValueError(
            f"mask_token_id={mask} is outside the target's embedding of {embedding_rows} rows; choose an id in "
            f"0..{embedding_rows - 1} that texts do not use."
        )
    text_config = target_config.get_text_config(decoder=True)
    expected = {
        "hidden_size": text_config.hidden_size,
        "num_target_layers": text_config.num_hidden_layers,
        "vocab_size": embedding_rows,  # engines size the shared head by it
    }
    for name, value in expected.items():
        given = getattr(drafter_config, name)
        if given != value:
            raise ValueError(
                f"The drafter's {name} is {given}, the target's is {value}: a drafter works only with the target "
                "whose hidden states, embeddings and head it was made for. Load that target, or make a drafter with "
                "DFlashDraftConfig.from_target_config(target.config, ...)."
            )


def _is_on(parameter: torch.Tensor, device: torch.device | str) -> bool:
    """Whether a parameter is on a device; a device without index means any of its kind that is in use."""
    device = torch.device(device)
    return parameter.device.type == device.type and device.index in (None, parameter.device.index)


def _decoder_layers(model: Any) -> nn.ModuleList:
    decoder = model.get_decoder()
    layers = dict(decoder.named_children()).get("layers")
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} keeps its decoder layers in another place than `get_decoder().layers`, so they "
            "cannot be read. Targets of the Llama and Qwen families and most others are supported."
        )
    return layers


def _load(name: str | Path, init_kwargs: dict) -> PreTrainedModel:
    if isinstance(name, Path) and not name.is_dir():
        raise OSError(f"There is no target folder {name}. Give a folder with config.json and weights, or a Hub id.")
    try:
        return AutoModelForCausalLM.from_pretrained(name, **init_kwargs)
    except OSError as error:
        raise OSError(
            f"The target {str(name)!r} cannot be loaded: it is neither a folder with config.json and weights nor a "
            f"model that the Hub gives to this account. Check the spelling, the path or the login. ({error})"
        ) from error


def _document_slices(document_lengths: Sequence[Sequence[int]], width: int) -> list[tuple[int, int, int]]:
    """(row, start, length) of every document."""
    pieces = []
    for row, lengths in enumerate(document_lengths):
        if sum(lengths) > width:
            raise ValueError(
                f"Row {row} holds documents of {sum(lengths)} tokens together but is {width} tokens wide: the lengths "
                "belong to other rows. Pass the document_lengths of this batch."
            )
        start = 0
        for length in lengths:
            if length > 0:
                pieces.append((row, start, length))
            start += length
    return pieces


def _groups_of_similar_length(pieces: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Documents by falling length, in groups whose padding stays below `MAX_PADDING`."""
    group: list[tuple[int, int, int]] = []
    tokens = 0
    for piece in sorted(pieces, key=lambda p: -p[2]):
        longest = group[0][2] if group else piece[2]
        if group and (len(group) + 1) * longest * (1 - MAX_PADDING) > tokens + piece[2]:
            yield group
            group, tokens = [], 0
        group.append(piece)
        tokens += piece[2]
    if group:
        yield group


__all__ = ["FrozenHead", "FrozenTarget"]
