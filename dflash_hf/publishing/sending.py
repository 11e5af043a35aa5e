# SPDX-License-Identifier: Apache-2.0
"""Sending a drafter's repository to the Hub: what can go wrong is asked first, then all files come in one commit.

Weights travel first and stay unseen until the commit names them. What has arrived is not sent again: the Hub knows it
by its hash, so a push that broke off is resumed by the same call.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError, RepositoryNotFoundError
from transformers.utils import logging

from ..checkpoint_format import is_adapter_folder
from ..modeling_dflash import DFlashDraftModel
from .card_results import load_results
from .model_card import CardOptions
from .repository import RESULTS_NAME, Publication, build_repository, check_repo_id
from .training_facts import read_facts


logger = logging.get_logger(__name__)

MAIN = "main"
# Weights of an earlier drafter, which would stay beside the new ones.
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


class PublishError(RuntimeError):
    """The repository could not be sent; what is here and what others see of it are as they were."""


def publish(
    publication: Publication,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload drafter",
    tag: str | None = None,
    token: str | bool | None = None,
    keep_card: bool = False,
) -> str:
    """Send a repository in one commit.

    Args:
        publication: What [`publishing.build_repository`] wrote.
        private: Whether a new repository is private; by default as the owner's settings say. A repository that is
            there already must be as asked.
        revision: Branch, made where it is missing; main by default.
        commit_message: First line of the commit.
        tag: Tag of the commit, which must be new.
        token: Access token; by default the environment's or the stored one.
        keep_card: Leave the card of a repository that has one as it is.

    Returns:
        Address of the commit.

    Raises:
        PublishError: Saying what is wrong and what to do.
    """
    repo_id = publication.repo_id
    check_repo_id(repo_id)
    api = HfApi(token=token)
    with _explained(repo_id, "asking who the token is of"):
        user = api.whoami()["name"]
    with _explained(repo_id, f"preparing it as {user}"):
        present = _prepare(api, repo_id, private, revision or MAIN, tag)
    kept = {"README.md"} & present if keep_card else set()
    names = [name for name in publication.files if name not in kept]
    operations: list = [CommitOperationAdd(name, str(publication.folder / name)) for name in names]
    stale = [n for n in sorted(present - set(names)) if "/" not in n and any(fnmatch(n, p) for p in WEIGHT_FILES)]
    operations += [CommitOperationDelete(name) for name in stale]
    with _explained(repo_id, "sending the files"):
        commit = api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
    if tag is not None:
        with _explained(repo_id, f"tagging the commit {commit.oid}, which is there,"):
            api.create_tag(repo_id, tag=tag, revision=commit.oid)
    return str(commit.commit_url)


def push_drafter(
    drafter: DFlashDraftModel,
    repo_id: str,
    dtype: torch.dtype | None = torch.bfloat16,
    *,
    facts: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
    options: CardOptions | None = None,
    **kwargs: Any,
) -> str:
    """Build a drafter's repository and send it, with what its folder knows of its training and measuring.

    Args:
        drafter: The drafter.
        repo_id: "OWNER/NAME".
        dtype: Type of the weights.
        facts: As for [`build_repository`]; by default `training.json` of the folder it was loaded from, unless it has
            been trained since.
        results: The same; by default `results.json` of that folder.
        options: As for [`build_repository`].
        **kwargs: Further arguments of [`publish`].

    Returns:
        Address of the commit.

    Raises:
        PublishError: It could not be sent.
        ValueError: A reader would not load it.
    """
    folder = Path(drafter.config.name_or_path or "")
    if drafter.config.name_or_path and folder.is_dir() and _is_of(drafter, folder):
        facts = read_facts(folder) if facts is None else facts
        results = recorded_results(folder) if results is None else results
    with tempfile.TemporaryDirectory() as temporary:
        publication = build_repository(
            drafter, temporary, repo_id, facts=facts, results=results, options=options, dtype=dtype
        )
        return publish(publication, **kwargs)


def _is_of(drafter: DFlashDraftModel, folder: Path) -> bool:
    """Whether a drafter still is what its folder tells of; one that was trained since is another."""
    # Of an adapter's folder a drafter is merged, and cannot be read again as it is.
    if is_adapter_folder(folder):
        return True
    try:
        stored = DFlashDraftModel.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    except (ValueError, OSError) as error:
        logger.warning(f"{folder} holds no drafter any more, so the card tells nothing of its training: {error}")
        return False
    own = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    if own.keys() == stored.keys() and all(torch.equal(tensor, stored[name]) for name, tensor in own.items()):
        return True
    logger.warning(
        f"The drafter was loaded from {folder} and has other weights by now, so the card tells neither the training "
        "nor the results that are recorded there. Push it by its trainer, or save it and publish its folder."
    )
    return False


def recorded_results(folder: Path, drafter: str | None = None) -> dict[str, Any] | None:
    """What was measured of a drafter, where its folder has it in a form that a card can tell.

    Args:
        folder: Of the drafter.
        drafter: Its name in the results, where they are of several.
    """
    path = folder / RESULTS_NAME
    if not path.is_file():
        return None
    try:
        return load_results(path, drafter)
    except ValueError as error:
        logger.warning(f"The card has no results: {error}.")
        return None


def full_repo_id(name: str, token: str | bool | None = None) -> str:
    """A repository's name with its owner, by default the token's.

    Args:
        name: "OWNER/NAME" or "NAME".
        token: As for [`publish`].

    Raises:
        PublishError: The token does not say whose it is.
    """
    if "/" in name:
        return name
    with _explained(name, "asking who the token is of"):
        return f"{HfApi(token=token).whoami()['name']}/{name}"


def _prepare(api: HfApi, repo_id: str, private: bool | None, branch: str, tag: str | None) -> set[str]:
    """Make the repository and its branch where they are missing; the names of the files that are on the branch."""
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError:
        # Another one's private repository looks the same; making it then says that the name is taken.
        api.create_repo(repo_id, private=private)
        info = api.model_info(repo_id)
    if private is not None and bool(info.private) != private:
        there, asked = ("private", "public") if info.private else ("public", "private")
        raise PublishError(
            f"{repo_id} is there and {there}, and private={private} was asked: a push does not make it {asked}. "
            "Change it in its settings, or leave private out."
        )
    refs = api.list_repo_refs(repo_id)
    if tag is not None and tag in [ref.name for ref in refs.tags]:
        raise PublishError(f"{repo_id} has a tag {tag} already, which others may rely on. Give another tag.")
    branches = [ref.name for ref in refs.branches]
    source = branch if branch in branches else MAIN
    present = set(api.list_repo_files(repo_id, revision=source)) if source in branches else set()
    _refuse_other_model(api, repo_id, source, present)
    if branch != MAIN and branch not in branches:
        api.create_branch(repo_id, branch=branch)
    return present


def _refuse_other_model(api: HfApi, repo_id: str, revision: str, present: set[str]) -> None:
    if "config.json" in present:
        config = json.loads(Path(api.hf_hub_download(repo_id, "config.json", revision=revision)).read_text())
        architectures = config.get("architectures") or []
        if "dflash_config" in config or "DFlashDraftModel" in architectures:
            return
        holds = f"a {' or '.join(architectures) or config.get('model_type', 'model')}"
    elif any(fnmatch(name, pattern) for name in present for pattern in WEIGHT_FILES):
        holds = "weights of something else"
    else:
        return
    raise PublishError(f"The name {repo_id} is taken: the repository holds {holds}, no drafter. Give another name.")


@contextmanager
def _explained(repo_id: str, doing: str) -> Iterator[None]:
    """Errors of the network as one that says what to do."""
    try:
        yield
    except PublishError:
        raise
    except LocalTokenNotFoundError:
        raise PublishError(
            f"{repo_id} was not sent: no access token. Set HF_TOKEN, or log in with `hf auth login`."
        ) from None
    # An upload in a thread, and one by Xet, end in a RuntimeError around what happened.
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
        raise PublishError(f"{repo_id} was not sent ({doing}): {_advice(repo_id, cause)}") from error


def _advice(repo_id: str, error: BaseException) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if status == 401:
        return (
            "the Hub does not accept the access token. Make one with write permission in your settings on the Hub, "
            "and set HF_TOKEN or log in with `hf auth login`."
        )
    if status == 403:
        return (
            f"the access token may not write to {repo_id}. Give it write permission for {repo_id.split('/')[0]}, or "
            "give a repo_id of your own."
        )
    if status == 409:
        return f"the name {repo_id} is taken by a repository that this token cannot see. Give another name."
    return (
        f"{text}. Others see all files of a commit or none, and nothing here has changed. Run the same again: what "
        "has arrived is not sent a second time."
    )


__all__ = ["PublishError", "full_repo_id", "publish", "push_drafter", "recorded_results"]
