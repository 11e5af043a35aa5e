# SPDX-License-Identifier: Apache-2.0
"""The frozen target: loaded, checked, tapped; hidden states of each document as of the document alone."""

import copy
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from huggingface_hub import ResolvedRevision
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import resolve_revision

from .configuration_dflash import DFlashDraftConfig
from .configuration_dflash2 import DFlash2DraftConfig, logit_scale_and_cap, target_scales
from .packed_targets import (
    LINEAR_ATTENTION_FLOOR,
    MAX_FORWARD_TOKENS,
    CannotPack,
    PackedDense,
    PackedQwen35,
    Piece,
    compiled_function,
    delta_kernels_available,
    document_pieces,
    flex_documents,
    groups_in_order,
    groups_of_similar_length,
    packed_row,
    refuse_ahead,
    transformers_delta_rule,
)


logger = logging.getLogger(__name__)


def check_fits(drafter_config: DFlashDraftConfig, target_config: PreTrainedConfig, embedding_rows: int) -> None:
    """Raise a ValueError for a drafter that was made for another target, whose embedding has `embedding_rows`."""
    mask = drafter_config.mask_token_id
    if mask is not None and mask >= embedding_rows:
        raise ValueError(f"mask_token_id={mask} is outside the target's embedding of {embedding_rows} rows.")
    text_config = target_config.get_text_config(decoder=True)
    expected = {
        "hidden_size": text_config.hidden_size,
        "num_target_layers": text_config.num_hidden_layers,
        "vocab_size": embedding_rows,  # engines size the shared head by it
    }
    if isinstance(drafter_config, DFlash2DraftConfig):
        # A selector's scores are added to logits that are scaled and capped by these fields.
        expected |= target_scales(target_config)
    for name, value in expected.items():
        given = getattr(drafter_config, name)
        if given != value and {given, value} not in ({None, 1}, {None, 0}):
            raise ValueError(
                f"The drafter's {name} is {given}, the target's is {value}. Load the drafter's own target, or make a "
                "drafter by DFlashDraftConfig.from_target_config."
            )


def decoder_layers(model: Any) -> nn.ModuleList:
    layers = dict(model.get_decoder().named_children()).get("layers")
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} keeps its decoder layers in another place than `get_decoder().layers`. Choose a "
            "target of the Llama or Qwen families or most others."
        )
    return layers


def check_taps(taps: list[int], depth: int) -> None:
    """Raise a ValueError for layers that a target of this depth does not have, or that cannot be read."""
    # The last layer's entry in hidden_states is after the final norm, while a hook sees it before.
    if not taps or any(b <= a for a, b in pairwise(taps)) or taps[0] < 0 or taps[-1] >= depth - 1:
        raise ValueError(
            f"target_layer_ids={taps} must be one or more of 0..{depth - 2}, unique and ascending: all layers of the "
            "target but the last one."
        )


def refuse_slow(config: PreTrainedConfig) -> None:
    """Raise a ValueError for a hybrid target without flash-linear-attention, or with one that is too old."""
    kinds = config.get_text_config(decoder=True).to_dict().get("layer_types") or []
    if "linear_attention" in kinds and not delta_kernels_available():
        raise ValueError(
            f"{kinds.count('linear_attention')} of the target's {len(kinds)} layers are linear attention, far too "
            "slow on a GPU without its kernels. Run "
            f"`pip install 'flash-linear-attention>={LINEAR_ATTENTION_FLOOR}'`, or pass allow_slow_target=True."
        )


def take_model(
    model: str | Path | PreTrainedModel,
    device: torch.device | str | None,
    allow_slow: bool,
    init_kwargs: dict[str, Any],
) -> PreTrainedModel:
    """A loaded target, from a Hub id, a folder or itself; refused where it could not run, or far too slowly."""
    if isinstance(model, str | Path):
        if not allow_slow and device is not None and torch.device(device).type == "cuda":
            with _explained(model):
                config = AutoConfig.from_pretrained(model, return_unused_kwargs=True, **init_kwargs)[0]
            refuse_slow(config)
        model = load_model(model, device, init_kwargs)
    elif not isinstance(model, nn.Module):
        raise TypeError(f"The target is a {type(model).__name__}; give a Hub id, a folder or a loaded model.")
    elif init_kwargs:
        raise ValueError(
            f"target_model_init_kwargs={init_kwargs} do not change a loaded target; give its id or folder."
        )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(f"{type(model).__name__} has parameters on the meta device; load it without offloading.")
    return model


def refuse_token(init_kwargs: Any, place: str) -> None:
    """Raise a ValueError for a token among arguments of `from_pretrained` that are kept; `place` says what happens."""
    if isinstance(init_kwargs, dict) and "token" in init_kwargs:
        raise ValueError(
            f"target_model_init_kwargs holds a token, which would {place}. Set the environment variable HF_TOKEN, or "
            "log in with `hf auth login`."
        )


def load_model(name: str | Path, device: torch.device | str | None, init_kwargs: dict) -> PreTrainedModel:
    """Load a target with all its weights; its configuration's `_commit_hash` says which commit of the Hub they are.

    A Hub id or folder goes to `device`, the CPU by default, with `init_kwargs` of `from_pretrained`. Where it cannot
    be loaded that is an OSError, and a missing weight, which transformers would make up, a ValueError.
    """
    if device is not None and torch.device(device).type == "cuda":
        # Weights go straight to the device, which some quantised ones must.
        init_kwargs = {"device_map": {"": str(torch.device(device))}, **init_kwargs}
    # transformers loads all files of one commit, and does not tell of which.
    places = {key: init_kwargs[key] for key in ("token", "cache_dir", "local_files_only") if key in init_kwargs}
    revision = resolve_revision(name, init_kwargs.get("revision"), **places)
    if isinstance(revision, ResolvedRevision):
        init_kwargs = {**init_kwargs, "revision": revision}
    with _explained(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **init_kwargs)
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"The target {str(name)!r} has no {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} "
            f"({len(missing)} of its weights), which would be random. Give a whole causal language model."
        )
    model.config._commit_hash = revision.resolved if isinstance(revision, ResolvedRevision) else None
    return model


@contextmanager
def _explained(name: str | Path) -> Iterator[None]:
    if isinstance(name, Path) and not name.is_dir():
        raise OSError(f"There is no target folder {name}. Give a folder with config.json and weights, or a Hub id.")
    try:
        yield
    except (SafetensorError, json.JSONDecodeError) as error:
        raise OSError(
            f"The target {str(name)!r} cannot be loaded: a file of it is damaged ({error}). Copy it again."
        ) from error
    except OSError as error:
        raise OSError(
            f"The target {str(name)!r} cannot be loaded, neither as a folder with config.json and weights nor from "
            f"the Hub. Check the spelling, the path or the login. ({error})"
        ) from error


def eos_token_ids(generation_config: GenerationConfig) -> list[int]:
    """Ids after which a target stops generating."""
    ids = generation_config.eos_token_id
    return [ids] if isinstance(ids, int) else list(ids or [])


def read_eos_token_ids(name: str) -> list[int]:
    """[`eos_token_ids`] of a Hub id or folder whose weights need not be there."""
    try:
        generation_config = GenerationConfig.from_pretrained(name)
    except OSError:
        # Not every model has the file; transformers then derives it from the configuration.
        generation_config = GenerationConfig.from_model_config(read_target_config(name))
    return eos_token_ids(generation_config)


def read_target_config(name: str) -> PreTrainedConfig:
    """The text model's configuration of a target, from a configuration file, a folder or a Hub id."""
    return AutoConfig.from_pretrained(name).get_text_config(decoder=True)


# Types that layers multiply in; others only store quantised weights.
COMPUTE_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class FrozenHead:
    """The target's embedding and head on the drafter's device; tied weights stay tied, and no copy is needless."""

    def __init__(self, target: PreTrainedModel, device: torch.device | str):
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(target).__name__} has no output head; load it with AutoModelForCausalLM.")
        # One deepcopy of both keeps a tied weight tied.
        pair = nn.ModuleList([embedding, head])
        if not all(is_on(p, device) for p in pair.parameters()):
            # A target spread over devices moves its inputs by hooks, which the copy must not follow.
            pair = remove_hook_from_module(copy.deepcopy(pair), recurse=True).to(device)
        self.embedding, self.head = pair.requires_grad_(False)
        self.embedding_weight: torch.Tensor = self.embedding.get_parameter("weight")
        if self.embedding_weight.dtype not in COMPUTE_TYPES:
            raise ValueError(
                f"The target's embedding is stored as {self.embedding_weight.dtype}, and the drafter reads its rows. "
                "Quantise the target without its embedding."
            )
        self.head_dtype: torch.dtype = head_place(self.embedding_weight, self.head)[1]
        self.vocab_size: int = self.embedding_weight.shape[0]
        self._transform = logit_transform(target.config.get_text_config(decoder=True))

    def noise_embeds(self, anchor_token_ids: torch.Tensor, mask_token_id: int, block_size: int) -> torch.Tensor:
        """[`block_inputs`] from the target's embedding."""
        return block_inputs(self.embedding_weight, anchor_token_ids, mask_token_id, block_size)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V]` of the drafter's output `[..., D]`, scaled and capped where the target's are."""
        return self._transform(self.head(hidden_states.to(self.head_dtype)))


def head_place(embedding_weight: torch.Tensor, head: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and type of a head's input."""
    # A quantised head may store integers, or no weight at all; it multiplies in the type of the embedding.
    weight = dict(head.named_parameters()).get("weight", embedding_weight)
    return weight.device, weight.dtype if weight.dtype in COMPUTE_TYPES else embedding_weight.dtype


def logit_transform(config: PreTrainedConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a target does with its logits after the head, by the fields of its configuration that say so."""
    scale, cap = logit_scale_and_cap(config)

    def transform(logits: torch.Tensor) -> torch.Tensor:
        logits = logits if scale == 1.0 else logits * scale
        return logits if not cap else cap * torch.tanh(logits / cap)

    return transform


def block_inputs(
    embedding_weight: torch.Tensor, anchor_token_ids: torch.Tensor, mask_token_id: int, block_size: int
) -> torch.Tensor:
    """Rows of the embedding `[V, D]` for `[anchor, mask, ..., mask]` of every block, `[B, N * block_size, D]`.

    They are without any norm or scale that the target puts on embeddings. Anchors' token ids are `[B, N]`.
    """
    rows, num_anchors = anchor_token_ids.shape
    ids = anchor_token_ids.new_full((rows, num_anchors, block_size), mask_token_id)
    ids[..., 0] = anchor_token_ids
    return nn.functional.embedding(ids.flatten(1), embedding_weight)


def is_on(parameter: torch.Tensor, device: torch.device | str) -> bool:
    """Whether a parameter is on a device; a device without index means any of its kind that is in use."""
    device = torch.device(device)
    return parameter.device.type == device.type and device.index in (None, parameter.device.index)


class _LastTapRead(Exception):
    """Ends the target's forward: nothing after the last tap is needed."""


def read_taps(
    decoder: nn.Module, layers: nn.ModuleList, target_layer_ids: Sequence[int], final_states: bool, **inputs: Any
) -> list[torch.Tensor]:
    """Outputs `[B, T, D]` of the tapped layers, and with `final_states` those of the final norm, by passing hooks."""
    taps: dict[int, torch.Tensor] = {}
    final = []

    def read(index: int, module: nn.Module, args: Any, output: Any) -> None:
        taps[index] = output[0] if isinstance(output, tuple) else output
        if index == target_layer_ids[-1] and not final_states:
            raise _LastTapRead

    with ExitStack() as hooks, suppress(_LastTapRead):
        for index in target_layer_ids:
            hooks.enter_context(layers[index].register_forward_hook(partial(read, index)))
        final = [decoder(**inputs).last_hidden_state]
    return [taps[index] for index in target_layer_ids] + final


PackedForward = PackedQwen35 | PackedDense


def packed_features(forward: PackedForward, input_ids: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """Features `[B, T, K * D]` of documents that run one after another in rows without padding between them.

    Token ids `[B, T]` are on the target's device, which nothing waits for. Zeros where no document is.
    """
    rows, width = input_ids.shape
    output = None
    for group in groups_in_order(pieces):
        row = packed_row(group, width, min(rows * width, MAX_FORWARD_TOKENS), input_ids.device)
        taps = forward.hidden_states(input_ids.flatten()[row.indices][None], row)
        output = taps[-1].new_zeros(rows * width, sum(t.shape[-1] for t in taps)) if output is None else output
        places = row.indices[: row.num_tokens]
        for tap, part in zip(taps, output.chunk(len(taps), dim=-1), strict=True):
            part.index_copy_(0, places, tap[0, : row.num_tokens])
    assert output is not None  # there is at least one document
    return output.view(rows, width, -1)


def padded_features(
    read_taps: Callable[..., list[torch.Tensor]], input_ids: torch.Tensor, pieces: Sequence[Piece]
) -> torch.Tensor:
    """The same by the target's own forward, one document per right-padded row, beside others of nearly its length."""
    output = None
    for group in groups_of_similar_length(pieces):
        padded = input_ids.new_zeros(len(group), group[0].length)
        for i, (row, start, length) in enumerate(group):
            padded[i, :length] = input_ids[row, start : start + length]
        taps = read_taps(input_ids=padded, use_cache=False)
        # The taps of a target that is spread over devices end on the last one.
        output = taps[-1].new_zeros(*input_ids.shape, sum(t.shape[-1] for t in taps)) if output is None else output
        for tap, part in zip(taps, output.chunk(len(taps), dim=-1), strict=True):
            for i, (row, start, length) in enumerate(group):
                part[row, start : start + length] = tap[i, :length]
    assert output is not None  # there is at least one document
    return output


_CUDNN_LOCK = Lock()
_CUDNN_BEFORE: list[bool] = []  # what was there, once for each user


@contextmanager
def varied_lengths() -> Iterator[None]:
    """Leave cuDNN out of `scaled_dot_product_attention` while someone works on lengths that change.

    On Hopper GPUs recent versions of torch prefer cuDNN's attention, which plans anew for each shape it has not seen:
    some 40 ms on the host, in every round of decoding, and for every new length of a document. Flash attention and the
    memory-efficient kernel need no plan. The choice is one of the whole process, so that threads which work at the
    same time share it: the last one gives back what was there. Whoever runs attention beside them holds it too, as a
    trainer does all along: otherwise its kernels would change with theirs.
    """
    with _CUDNN_LOCK:
        _CUDNN_BEFORE.append(_CUDNN_BEFORE[0] if _CUDNN_BEFORE else torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _CUDNN_LOCK:
            before = _CUDNN_BEFORE.pop()
            if not _CUDNN_BEFORE:
                torch.backends.cuda.enable_cudnn_sdp(before)


# Two short documents that end within a chunk of the kernels and behind one.
CHECKED_LENGTHS = (70, 90)
# Fewest tokens of the checked row: kernels that tune themselves do so at the first call, for good.
FEWEST_TOKENS = 1024
# Largest relative difference per layer up to a tap, by the precision of the hidden states. Two right ways of rounding
# differ by about a third of it; a layer that computes something else soon differs by far more.
TOLERANCES = {torch.float64: 1e-7, torch.float32: 2e-3}
LOW_PRECISION_TOLERANCE = 0.01


def _difference(actual: torch.Tensor, expected: torch.Tensor, target_layer_ids: Sequence[int]) -> str | None:
    """The first tap that differs by more than its layers' rounding may."""
    per_layer = TOLERANCES.get(actual.dtype, LOW_PRECISION_TOLERANCE)
    parts = (tensor.float().chunk(len(target_layer_ids), dim=-1) for tensor in (actual, expected))
    for layer, tap, expected_tap in zip(target_layer_ids, *parts, strict=True):
        error = ((tap - expected_tap).norm() / expected_tap.norm()).item()
        allowed = min(per_layer * (layer + 1), 0.5)
        if not error <= allowed:
            return f"at layer {layer} by {error:.2g} of their size, where {allowed:.2g} is allowed"
    return None


def keep_tuned_kernels() -> Path | None:
    """Settle the folder of Triton's kernels (`TRITON_CACHE_DIR`) for this process, before any is compiled.

    Inductor sets that variable to another folder for each device, but only in a process that compiles a kernel itself:
    kernels that other libraries tune would lie in one folder after the first launch and be looked for in another at
    the second. Returns None, and says so, where Triton's own folder cannot be written.
    """
    if given := os.environ.get("TRITON_CACHE_DIR"):
        return Path(given)
    # As Triton has it, which takes "~" itself where a user has no home.
    folder = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    # One that is there may be another user's.
    if not os.access(folder, os.W_OK | os.X_OK):
        logger.warning(f"{folder} cannot be written, so kernels are tuned at each launch. Set TRITON_CACHE_DIR.")
        return None
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    return folder


class FrozenTarget:
    """A causal language model that only ever gives hidden states to a drafter.

    It is not an `nn.Module`, so that no trainer moves, saves or optimises it.

    Args:
        model (`str`, `Path` or `PreTrainedModel`):
            Hub id or folder, loaded and cut after the last tap, or a loaded model, frozen as it is.
        target_layer_ids (`list[int]`): Taps: 0-based decoder layers whose outputs are read.
        device: Where the target runs; None leaves it where it is.
        packed (`bool`, *optional*):
            Whether documents may share a row of the target's forward, where its layers allow it and after a check at
            the first call; by default on CUDA.
        compile_target: Whether to compile, on CUDA, the layers of a Qwen3.5/3.6 target, which takes up to a minute
            (quantised ones are left as they are), or the attention of other targets over packed documents.
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
        self._lock = Lock()
        self._packed: PackedForward | None = None
        self._unchecked: PackedForward | None = None
        if (on_cuda if packed is None else packed) and len(devices) == 1:
            self._unchecked = self._packable(compile_target and on_cuda)
        self._kernel_folder = keep_tuned_kernels() if on_cuda and isinstance(self._unchecked, PackedQwen35) else None

    def _packable(self, compiled: bool) -> PackedForward | None:
        """The packed path that this target's layers have, to be checked at the first call."""
        decoder = self.model.get_decoder()
        if PackedQwen35.fits(decoder):
            compiled = compiled and not _quantised(self.model)
            return PackedQwen35(decoder, self.target_layer_ids, compiled, final_states=self.final_states)
        if compiled and PackedDense.compiles(decoder):
            return PackedDense(decoder, self._read_taps, compiled_function(flex_documents))
        if PackedDense.fits(decoder):
            return PackedDense(decoder, self._read_taps)
        self._say_padded("only Qwen3.5/3.6, full attention by sdpa and, compiled, sliding attention are packed")
        return None

    def _say_padded(self, reason: str) -> None:
        logger.warning(
            f"Documents cannot share a row of this {type(self.model).__name__}: {reason}. Each runs in its own row, "
            "which is right and slower."
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
        return f"The target's layers are compiled and tuned before the first step: a minute or two, {kept}."

    def check_drafter(self, config: DFlashDraftConfig) -> None:
        """Raise a ValueError for a drafter that was made for another target or other taps."""
        check_fits(config, self.config, self.model.get_input_embeddings().weight.shape[0])
        if config.target_layer_ids != self.target_layer_ids:
            raise ValueError(
                f"The drafter's target_layer_ids is {config.target_layer_ids}, the FrozenTarget's "
                f"{self.target_layer_ids}. Give both the same."
            )

    @torch.no_grad()
    def context_hidden_states(
        self, input_ids: torch.Tensor, document_lengths: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """Outputs of the tapped layers for packed rows, each document as if it were alone.

        Where the target can be packed, documents run one after another in one row, and every mixing layer gets their
        borders. Elsewhere they run one per right-padded row without attention mask or position ids: padding on the
        right changes nothing before it. On a GPU nothing waits for the device after the first call, so that a worker
        thread can run ahead.

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
        """[`context_hidden_states`]; with `final_states` `[B, T, (K + 1) * D]`, those after the final norm last."""
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
            if packed is None:
                return padded_features(self._read_taps, input_ids, pieces)
            return packed_features(packed, input_ids, pieces)

    def split(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What [`all_hidden_states`] gives, in parts: the context, and the final states or None."""
        if not self.final_states:
            return states, None
        return states[..., : -self.config.hidden_size], states[..., -self.config.hidden_size :]

    def _read_taps(self, **inputs: Any) -> list[torch.Tensor]:
        return read_taps(self.model.get_decoder(), self.layers, self.target_layer_ids, self.final_states, **inputs)

    def _checked_packing(self, tokens: int) -> PackedForward | None:
        """The packed path, if there is one that passes the check of the first call."""
        if self._unchecked is not None:
            # It compiles; and a thread that is ahead must not wait for the one that is in it.
            refuse_ahead("The check of the target")
        with self._lock:
            if self._unchecked is not None:
                if notice := self.tuning_notice():
                    logger.warning(notice)
                with transformers_delta_rule():
                    fault = self._packing_fault(self._unchecked, tokens)
                if fault is None:
                    self._packed = self._unchecked
                else:
                    self._say_padded(fault)
                self._unchecked = None
        return self._packed

    def _packing_fault(self, packed: PackedForward, tokens: int) -> str | None:
        """What is wrong with a packed path, by two short documents and the target's own forward of each; or None.

        The checked row has the `tokens` of the batches to come, a third document included, so that what is compiled
        or tuned now fits them; at least `FEWEST_TOKENS`, at most one forward's.
        """
        taps = self.target_layer_ids
        if isinstance(packed, PackedQwen35):
            # No deeper than one layer of each kind: all others run the same kernels, and the check is quicker.
            kinds = [layer.block_type for layer in self.layers[: taps[-1] + 1]]
            taps = [max(kinds.index(kind) for kind in set(kinds))]
            packed = packed.tapped(taps)
        first, second = CHECKED_LENGTHS
        both = first + second
        length = min(max(tokens, FEWEST_TOKENS), MAX_FORWARD_TOKENS)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.config.vocab_size, (1, length), generator=generator)
        pieces = document_pieces([[first, second, length - both]], length)

        def features_of_both() -> torch.Tensor:
            # A dense target's final states come behind its taps.
            width = len(taps) * self.config.hidden_size
            return packed_features(packed, ids.to(self.device), pieces)[0, :both, :width]

        try:
            features = features_of_both()
        except CannotPack as reason:
            return str(reason)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            # A compiler that is missing, a kernel that it cannot make for this device, or a forward that takes no
            # more arguments than it names.
            return f"it does not run here ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
        read = partial(read_taps, self.model.get_decoder(), self.layers, taps, False)
        expected = padded_features(read, ids[:, :both].to(self.device), pieces[:2])[0]
        for document in (slice(0, first), slice(first, None)):
            if difference := _difference(features[document], expected[document], taps):
                return f"features differ from those of each document alone, {difference}"
        ids[0, :first] = (ids[0, :first] + 1) % self.config.vocab_size
        if not torch.equal(features_of_both()[first:], features[first:]):
            return "a document's features change with those of the document before it"
        return None


def _quantised(model: Any) -> bool:
    """Whether a compiler would meet layers or weights that are not torch's own."""
    plain = all(type(p) is nn.Parameter and p.dtype in COMPUTE_TYPES for p in model.parameters())
    return not plain or "quantization_config" in model.config.to_dict()


def random_target(
    config: PreTrainedConfig, target_layer_ids: list[int], device: torch.device | str,
    dtype: torch.dtype | str = torch.bfloat16, seed: int = 0, **options: Any,
) -> FrozenTarget:  # fmt: skip
    """A target with the shape of a real one and random weights, made on its device: nothing passes through the host.

    `config` is the text model's, `dtype` a torch type or its name; `options` are further arguments of
    [`FrozenTarget`]. What a drafter learns from it is worth nothing.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    target = FrozenTarget(model, target_layer_ids, **options)
    if not target.final_states:
        # Nobody else's, so that it may be cut as one that is loaded is.
        del target.layers[target_layer_ids[-1] + 1 :]
    return target


def synthetic_documents(
    count: int, length: int, vocab_size: int, mask_token_id: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Documents of random tokens but the mask, whose first sixteenth is a prompt and whose rest is supervised."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size - 1, (count, length), generator=generator)
    ids += ids >= mask_token_id
    return [{"input_ids": row.tolist(), "supervised_spans": [[length // 16, length]]} for row in ids]


# Of the published drafters, by the target's model type and vocabulary.
KNOWN_MASK_TOKENS = {
    ("qwen3", 151936): 151669,
    ("qwen3_moe", 151936): 151669,
    ("qwen3_5_text", 248320): 248070,
    ("qwen3_5_moe_text", 248320): 248070,
}
RESERVED_TOKEN = re.compile(
    r"[<\[]\|?(?:reserved|unused|extra|control|special|dummy|placeholder)\w*?\d+\|?[>\]]", re.IGNORECASE
)


def mask_token_for(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """A token id that texts never hold, for the slots to be drafted: the published one, a reserved one, a padding row.

    `config` is the target's text configuration. Without such an id a ValueError names special tokens that may serve.
    """
    if (known := KNOWN_MASK_TOKENS.get((config.model_type, config.vocab_size))) is not None:
        return known
    if tokenizer is None:
        raise ValueError("Without a tokenizer no mask token can be chosen: give processing_class, or a mask_token_id.")
    vocabulary, template = tokenizer.get_vocab(), str(tokenizer.chat_template)
    reserved = [i for token, i in vocabulary.items() if RESERVED_TOKEN.fullmatch(token) and token not in template]
    taken = set(vocabulary.values())
    padding = (i for i in range(config.vocab_size) if i not in taken)
    found = min((i for i in reserved if i < config.vocab_size), default=next(padding, None))
    if found is not None:
        return found
    used = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token}
    added = {i: str(token) for i, token in sorted(tokenizer.added_tokens_decoder.items())}
    special = [f"{i} ({token})" for i, token in added.items() if token not in used and token not in template]
    raise ValueError(
        "The target's tokenizer reserves no token and its embedding has no free row for the slots to be drafted. Give "
        f"--mask_token_id, a special token that your texts never hold, such as {', '.join(special[-3:])}."
    )
