# SPDX-License-Identifier: Apache-2.0
"""What a publisher adds to a drafter's card."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CardOptions:
    """What the publisher says, and no file knows.

    Args:
        base_model: Hub id of the target; by default the one that the run recorded.
        license: Identifier of the licence, such as "apache-2.0".
        languages: Codes of the languages of the training data.
        plots: File names of images in the repository.
        adapted_from: Hub id of the drafter it was adapted from; by default the one that the run recorded.
        train_command: How to repeat the training.
        results_command: How to repeat the measurement.
        limits: Further limits, one sentence each.
        planned: Whether the card is of a drafter that is not trained yet.
    """

    base_model: str | None = None
    license: str | None = None
    languages: Sequence[str] = ()
    plots: Sequence[str] = ()
    adapted_from: str | None = None
    train_command: str | None = None
    results_command: str | None = None
    limits: Sequence[str] = ()
    planned: bool = False
