# SPDX-License-Identifier: Apache-2.0
"""A drafter as a repository of the Hub: everything that its users need, checked, and sent in one commit."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging

from ..modeling_dflash import DFlashDraftModel
from ..runs.guards import first_nonfinite_parameter
from ..validation.reading import read_folder
from ..validation.validate import ValidationReport, validate_checkpoint
from .card_results import CardResults, plot_results, read_results
from .model_card import CardOptions, model_card


logger = logging.get_logger(__name__)

RESULTS_NAME = "results.json"
PLOT_NAME = "acceptance.png"
FP32_FOLDER = "fp32"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".svg", ".webp", ".gif")


@dataclass(frozen=True)
class Publication:
    """A folder that is ready to be sent.

    Args:
        folder: With all files of the repository.
        repo_id: Whose card and commands are in it.
        report: What every reader needs of it; without errors.
    """

    folder: Path
    repo_id: str
    report: ValidationReport

    @property
    def files(self) -> dict[str, int]:
        """Size in bytes of each file, by its path in the repository."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in paths}

    def __str__(self) -> str:
        files = self.files
        width = max(len(name) for name in files)
        lines = [f"{name:<{width}}  {_size(size):>9}" for name, size in files.items()]
        return "\n".join([f"{self.repo_id}:", *lines, f"{'in all':<{width}}  {_size(sum(files.values())):>9}"])


def build_repository(
    drafter: DFlashDraftModel,
    folder: str | Path,
    repo_id: str,
    *,
    facts: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
    results_drafter: str | None = None,
    plots: Iterable[str | Path] = (),
    options: CardOptions | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    fp32: bool = False,
) -> Publication:
    """Write all files of a repository, without any network.

    Args:
        drafter: The drafter; it is not changed.
        folder: To write to, empty or new.
        repo_id: "OWNER/NAME" of the repository.
        facts: `training.json` of the run.
        results: `results.json` of `recipes/evaluate_acceptance.py` or the demo.
        results_drafter: Which drafter of it, where it has several.
        plots: Further images.
        options: What the publisher adds to the card.
        dtype: Type of the weights.
        fp32: Whether to add the weights as they were trained, in the folder `fp32`.

    Raises:
        ValueError: `repo_id` is no full name, the folder holds something, a plot has the name of another file, or a
            reader would not load the drafter.
    """
    folder, options, images = Path(folder), options or CardOptions(), [Path(plot) for plot in plots]
    check_repo_id(repo_id)
    _check_plots(images, taken=() if results is None else (PLOT_NAME,))
    if parameter := first_nonfinite_parameter(drafter):
        raise ValueError(
            f"{repo_id} is not sent: the drafter's {parameter} holds NaN or infinity, so it drafts nothing. Take an "
            "earlier checkpoint."
        )
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty, and all that is in it would be published. Give a new folder.")
    card_results = None if results is None else read_results(results, results_drafter)
    try:
        drafter.save_pretrained(folder, dtype=dtype)
        if fp32:
            drafter.save_pretrained(folder / FP32_FOLDER, dtype=torch.float32)
        for image in images:
            shutil.copy(image, folder / image.name)
        report = _write_texts(folder, repo_id, facts, results, card_results, images, options)
    except BaseException:
        # The same command must find the folder as it was.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Publication(folder, repo_id, report)


def _write_texts(
    folder: Path,
    repo_id: str,
    facts: dict[str, Any] | None,
    results: dict[str, Any] | None,
    card_results: CardResults | None,
    images: list[Path],
    options: CardOptions,
) -> ValidationReport:
    """Write results, plot and card beside the drafter, and check the whole."""
    names = [image.name for image in images]
    if card_results is not None:
        (folder / RESULTS_NAME).write_text(json.dumps(without_local_paths(results), indent=1) + "\n")
        if find_spec("matplotlib") is not None:
            plot_results(card_results, folder / PLOT_NAME)
            names = [PLOT_NAME, *(name for name in names if name != PLOT_NAME)]
        else:
            logger.warning("The card has no plot of the acceptance: pip install matplotlib.")
    card = model_card(read_folder(folder, repo_id), facts, card_results, replace(options, plots=names))
    card.save(folder / "README.md")
    report = validate_checkpoint(folder)
    if not report.ok:
        raise ValueError(f"{repo_id} is not sent, since not every reader would load it as it was trained.\n{report}")
    return report


def _check_plots(images: list[Path], taken: tuple[str, ...]) -> None:
    """Refuse images that would take the place of each other, or of another file of the repository."""
    names = [*taken, *(image.name for image in images)]
    for image in images:
        if image.suffix.lower() not in IMAGE_SUFFIXES or names.count(image.name) > 1:
            raise ValueError(
                f"The plot {image} cannot be published: expected an image ({', '.join(IMAGE_SUFFIXES)}) whose name no "
                f"other has ({PLOT_NAME} is made of the results). Rename it."
            )


def check_repo_id(repo_id: str) -> None:
    """Refuse what is not "OWNER/NAME".

    Raises:
        ValueError: Naming it.
    """
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"repo_id={repo_id!r} is no name of a repository: {error}") from None
    if "/" not in repo_id:
        raise ValueError(
            f"repo_id={repo_id!r} has no owner: the card's commands name the whole repository. Give OWNER/{repo_id}."
        )


def without_local_paths(value: Any) -> Any:
    """JSON values in which every local path is cut to its last part.

    Args:
        value: A value; keys of objects are looked at too.
    """
    if isinstance(value, dict):
        keys = _unlike([without_local_paths(key) for key in value])
        return {key: without_local_paths(item) for key, item in zip(keys, value.values(), strict=True)}
    if isinstance(value, list):
        return [without_local_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and _is_local_path(value) else value


def _unlike(names: list[str]) -> list[str]:
    """Names of which later ones are numbered where they are alike, as drafters in folders of one name are."""
    return [
        name if name not in names[:i] else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]


def _is_local_path(text: str) -> bool:
    # Answers are texts too; a path has no blanks or line ends worth keeping and is short.
    if "/" not in text or len(text) > 1024 or "\n" in text:
        return False
    return text.startswith(("/", "./", "../", "~")) or Path(text).exists()


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} GB"


__all__ = ["Publication", "build_repository", "check_repo_id", "without_local_paths"]
