# SPDX-License-Identifier: Apache-2.0
"""From a trained drafter to a repository of the Hub: its files, checked, in one commit, and the trainer's own pushes.

Nothing is sent that a server would not load, and neither a local path nor a secret.

    dflash-hf publish --drafter outputs/drafter --repo_id OWNER/NAME --dry_run true
    dflash-hf publish --drafter outputs/drafter --repo_id OWNER/NAME --base_model Qwen/Qwen3.6-27B

The access token comes from HF_TOKEN or `hf auth login`. A push that broke off is resumed by the same command.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers.trainer_utils import HubStrategy
from transformers.utils import CONFIG_NAME, hf_api, logging
from transformers.utils.hub import PushInProgress

from .adapting import plain_drafter
from .callbacks import first_nonfinite_parameter
from .chats import describe
from .checkpoint_files import is_adapter_folder
from .checkpointing import STAGING_PREFIX, checkpoints_in
from .cli import errors_in_one_line, parse_config
from .model_card import (
    RESULTS_NAME,
    CardOptions,
    load_results,
    model_card,
    plot_results,
    read_facts,
    read_results,
    recorded_results,
)
from .modeling_dflash import DFlashDraftModel
from .validation import read_folder, validate_checkpoint
from .writing import linked_copy


logger = logging.get_logger(__name__)

PLOT_NAME = "acceptance.png"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".svg", ".webp", ".gif")
# Weights of an earlier drafter, which would stay beside the new ones.
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


# --- The files of a repository.


@dataclass(frozen=True)
class Publication:
    """A folder with all files of the repository `repo_id`, which has been validated."""

    folder: Path
    repo_id: str

    @property
    def files(self) -> dict[str, int]:
        """Size in bytes of each file, by its path in the repository."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in paths}

    def __str__(self) -> str:
        sizes = {**self.files, "in all": sum(self.files.values())}
        width = max(map(len, sizes))
        return "\n".join([f"{self.repo_id}:", *(f"{name:<{width}}  {_size(n):>9}" for name, n in sizes.items())])


def _size(number: float) -> str:
    """Bytes in words, such as "1.5 kB"."""
    unit = min(int(math.log10(max(number, 1))) // 3, 3)
    return f"{number / 1000**unit:.{(0, 1, 1, 2)[unit]}f} {('B', 'kB', 'MB', 'GB')[unit]}"


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
        results: `results.json` of `dflash-hf evaluate` or the demo.
        results_drafter: Which drafter of it, where it has several.
        plots: Further images.
        options: What the publisher adds to the card.
        dtype: Type of the weights.
        fp32: Whether to add the weights as they were trained, in the folder `fp32`.

    Raises:
        ValueError: `repo_id` is not a full name, the folder holds something, a plot has the name of another file, or a
            reader would not load the drafter.
    """
    folder, images = Path(folder), [Path(plot) for plot in plots]
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"repo_id={repo_id!r} has no owner, whom the card's commands name. Give OWNER/{repo_id}.")
    has_plot = results is not None and find_spec("matplotlib") is not None
    names = [*([PLOT_NAME] if has_plot else []), *(image.name for image in images)]
    for image in images:
        if image.suffix.lower() not in IMAGE_SUFFIXES or names.count(image.name) > 1:
            raise ValueError(
                f"The plot {image} cannot be published: it is not one of {', '.join(IMAGE_SUFFIXES)}, or another plot "
                f"has its name ({PLOT_NAME} is made of the results). Rename it."
            )
    if parameter := first_nonfinite_parameter(drafter):
        raise ValueError(f"{repo_id} is not sent: {parameter} of the drafter holds NaN or infinity.")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty, and all that is in it would be published. Give a new folder.")
    card_results = None if results is None else read_results(results, results_drafter)
    try:
        drafter.save_pretrained(folder, dtype=dtype)
        if fp32:
            drafter.save_pretrained(folder / "fp32", dtype=torch.float32)
        for image in images:
            shutil.copy(image, folder)
        if card_results is not None:
            (folder / RESULTS_NAME).write_text(json.dumps(without_local_paths(results), indent=1) + "\n")
            if has_plot:
                plot_results(card_results, folder / PLOT_NAME, repo_id)
            else:
                logger.warning("The card has no plot of the acceptance: pip install matplotlib.")
        options = replace(options or CardOptions(), plots=names)
        model_card(read_folder(folder, repo_id), facts, card_results, options).save(folder / "README.md")
        report = validate_checkpoint(folder)
        if not report.ok:
            raise ValueError(f"{repo_id} is not sent, since not every reader would load it correctly.\n{report}")
    except BaseException:
        # The same command must find the folder as it was.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Publication(folder, repo_id)


def without_local_paths(value: Any) -> Any:
    """JSON values in which every local path, in keys too, is cut to its last part."""
    if isinstance(value, list):
        return [without_local_paths(item) for item in value]
    if isinstance(value, dict):
        cut: dict[Any, Any] = {}
        for key, item in value.items():
            name, count = without_local_paths(key), 1
            # Drafters in folders of one name stay apart.
            while (numbered := name if count == 1 else f"{name} ({count})") in cut:
                count += 1
            cut[numbered] = without_local_paths(item)
        return cut
    # Answers are texts too; a path has no line ends and is short.
    if not isinstance(value, str) or "/" not in value or len(value) > 1024 or "\n" in value:
        return value
    return Path(value).name if value.startswith(("/", "./", "../", "~")) or Path(value).exists() else value


# --- Sending.


class PublishError(OSError):
    """The repository could not be sent; what is here and what others see of it are as they were."""


@contextmanager
def _explained(repo_id: str, doing: str) -> Iterator[None]:
    """Errors of the network as one that says what to do."""
    try:
        yield
    except PublishError:
        raise
    # An upload in a thread, and one by Xet, end in a RuntimeError around what happened.
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, HTTPError) else error
        raise PublishError(
            f"{doing} {repo_id} failed: {' '.join(describe(cause).split())} Check the network and the access token "
            "(HF_TOKEN, or `hf auth login`), which needs the right to write there, and run the same again."
        ) from error


def check_push(args: Any) -> None:
    """Make the repository that a run pushes to, so that what hinders it shows before anything is loaded."""
    if args.push_to_hub and args.process_index == 0:
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        with _explained(name, "push_to_hub=True: making"):
            HfApi(token=args.hub_token).create_repo(name, private=args.hub_private_repo, exist_ok=True)


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
    """Send a repository in one commit: others see all of it or nothing.

    Args:
        publication: What [`build_repository`] wrote.
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
        PublishError: Saying what is wrong and what to do. What has arrived is not sent a second time.
    """
    repo_id, branch, api = publication.repo_id, revision or "main", HfApi(token=token)
    with _explained(repo_id, "Preparing"):
        # Another one's private repository looks as if it was not there; making it then says that the name is taken.
        api.create_repo(repo_id, private=private, exist_ok=True)
        is_private = bool(api.model_info(repo_id).private)
        refs = api.list_repo_refs(repo_id)
        branches = [ref.name for ref in refs.branches]
        if private is not None and is_private != private:
            raise PublishError(f"{repo_id} is there, with private={is_private}. Change that in its settings.")
        if tag is not None and tag in [ref.name for ref in refs.tags]:
            raise PublishError(f"{repo_id} already has a tag {tag}, which others may rely on. Give another tag.")
        source = branch if branch in branches else "main"
        present = set(api.list_repo_files(repo_id, revision=source)) if source in branches else set()
        _refuse_other_model(api, repo_id, source, present)
        api.create_branch(repo_id, branch=branch, exist_ok=True)
    kept = {"README.md"} & present if keep_card else set()
    names = [name for name in publication.files if name not in kept]
    stale = [name for name in sorted(present - set(names)) if "/" not in name and _holds_weights(name)]
    operations: list = [CommitOperationAdd(name, str(publication.folder / name)) for name in names]
    operations += [CommitOperationDelete(name) for name in stale]
    with _explained(repo_id, "Sending the files of"):
        commit = api.create_commit(repo_id, operations, commit_message=commit_message, revision=branch)
    if tag is not None:
        with _explained(repo_id, f"Its files are there. Tagging the commit {commit.oid} of"):
            api.create_tag(repo_id, tag=tag, revision=commit.oid)
    return str(commit.commit_url)


def _refuse_other_model(api: HfApi, repo_id: str, revision: str, present: set[str]) -> None:
    """Refuse a repository that holds weights of something else than a drafter."""
    config: dict[str, Any] = {}
    if "config.json" in present:
        config = json.loads(Path(api.hf_hub_download(repo_id, "config.json", revision=revision)).read_text())
    elif not any(map(_holds_weights, present)):
        return
    architectures = config.get("architectures") or []
    if "dflash_config" not in config and "DFlashDraftModel" not in architectures:
        holds = " or ".join(architectures) or config.get("model_type", "model")
        raise PublishError(f"{repo_id} holds a {holds}, which is not a drafter. Give another name.")


def _holds_weights(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in WEIGHT_FILES)


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
    """Build a drafter's repository and send it, as [`build_repository`] and [`publish`] do.

    By default `facts` and `results` are those of the folder it was loaded from, unless it has been trained since.
    """
    folder = Path(drafter.config.name_or_path or "")
    if drafter.config.name_or_path and folder.is_dir() and _is_of(drafter, folder):
        facts = read_facts(folder) if facts is None else facts
        results = recorded_results(folder) if results is None else results
    with tempfile.TemporaryDirectory() as temporary:
        publication = build_repository(
            drafter, temporary, repo_id, dtype=dtype, facts=facts, results=results, options=options
        )
        return publish(publication, **kwargs)


def _is_of(drafter: DFlashDraftModel, folder: Path) -> bool:
    """Whether a drafter still is what its folder tells of, in bf16; one that was trained since is another."""
    # Of an adapter's folder a drafter is merged, and cannot be read again as it is.
    if is_adapter_folder(folder):
        return True
    own = drafter.state_dict()
    try:
        saved = DFlashDraftModel.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
        if saved.keys() == own.keys() and all(torch.equal(t, own[n].to(t.device, t.dtype)) for n, t in saved.items()):
            return True
    except (OSError, ValueError) as error:
        logger.warning(f"{folder} cannot be read: {error}")
    logger.warning(
        f"The drafter was loaded from {folder} and is not what is there by now, so the card tells neither the "
        "training nor the results that are recorded there. Push it by its trainer, or save it and publish its folder."
    )
    return False


# --- What a trainer pushes.


def _trained(trainer: Any) -> DFlashDraftModel:
    return plain_drafter(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))


def write_publishable(trainer: Any, folder: Path) -> None:
    """Write what users of a drafter load: bf16 weights in the published layout, its code and the tokenizer."""
    _trained(trainer).save_pretrained(folder, dtype=torch.bfloat16)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)


def _in_background(trainer: Any, folder: Path, send: Callable[[], Any]) -> Future:
    """Send a folder behind what is being sent, and remove it then; a failure is told of and ends no training."""

    def work() -> Any:
        try:
            return send()
        except Exception as error:
            logger.warning(f"{folder.name} did not arrive at {trainer.hub_model_id}: {describe(error)}")
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    running: PushInProgress | None = trainer.push_in_progress
    future = hf_api().run_as_future(work)
    before = [] if running is None or running.is_done() else running.jobs
    trainer.push_in_progress = PushInProgress([*before, future])  # type: ignore[arg-type, misc]
    return future


def push_checkpoint(trainer: Any, checkpoint: Path) -> None:
    """Push the present drafter, and the checkpoint where `hub_strategy` says so, in one commit in the background.

    They are pushed from a folder of their own, which stays until then: later steps change neither, and a checkpoint
    may be rotated away meanwhile.
    """
    args, strategy, step = trainer.args, trainer.args.hub_strategy, trainer.state.global_step
    if not trainer.is_world_process_zero() or strategy == HubStrategy.END:
        return
    running: PushInProgress | None = trainer.push_in_progress
    if running is not None and not running.is_done() and not args.hub_always_push:
        logger.warning(f"{checkpoint.name} is not pushed to the Hub: the push before it is still going on.")
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    staging = Path(args.output_dir) / f"{STAGING_PREFIX}{step}"
    try:
        write_publishable(trainer, staging)
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            name = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else checkpoint.name
            linked_copy(checkpoint, staging / name)
    # Tokenizers raise bare exceptions. Other ranks would wait for one that stops here, and the checkpoint is there.
    except Exception as error:
        logger.warning(f"{checkpoint.name} cannot be set aside to be pushed to the Hub ({error}).")
        shutil.rmtree(staging, ignore_errors=True)
        return

    def send() -> None:
        HfApi(token=args.hub_token).upload_folder(
            repo_id=trainer.hub_model_id,
            folder_path=str(staging),
            commit_message=f"Training in progress, step {step}",
            revision=args.hub_revision,
            # Files of an older checkpoint that this one does not have, such as the states of more ranks.
            delete_patterns="last-checkpoint/*",
            # A pickle that nothing reads.
            ignore_patterns=["training_args.bin", "*/training_args.bin"],
        )

    _in_background(trainer, staging, send)


def build_publication(trainer: Any, folder: Path, repo_id: str, options: CardOptions | None = None) -> Publication:
    """The repository of a trainer's present drafter, with what the run and its output folder know."""
    output = Path(trainer.args.output_dir)
    plots = [path for path in sorted(output.glob("*.png")) if path.name != PLOT_NAME]
    facts, results = read_facts(output), recorded_results(output)
    return build_repository(
        _trained(trainer), folder, repo_id, facts=facts, results=results, plots=plots, options=options
    )


def write_card(trainer: Any, options: CardOptions | None = None) -> None:
    """Write the card of a trainer's present drafter into the output folder; needs no network."""
    output = Path(trainer.args.output_dir)
    name = trainer.hub_model_id or output.absolute().name
    with tempfile.TemporaryDirectory() as folder:
        build_publication(trainer, Path(folder), name if "/" in name else f"OWNER/{name}", options)
        shutil.copy(Path(folder, "README.md"), output)


def push_run(
    trainer: Any,
    commit_message: str,
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    tag: str | None = None,
    options: CardOptions | None = None,
) -> str | Future | None:
    """Publish the present drafter of a run as [`publish`] does; the trainer's arguments say what is not given.

    Returns the address of the commit, or a future of it if it is not `blocking`; None on all ranks but the first.
    """
    args, token = trainer.args, token or trainer.args.hub_token
    if not trainer.is_world_process_zero():
        return None
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    trainer._finish_current_push()
    repo_id = trainer.hub_model_id or args.hub_model_id or Path(args.output_dir).absolute().name
    if "/" not in repo_id:
        with _explained(repo_id, "Asking for the owner of"):
            repo_id = f"{HfApi(token=token).whoami()['name']}/{repo_id}"
    trainer.hub_model_id = repo_id
    staging = Path(args.output_dir) / f"{STAGING_PREFIX}final"
    shutil.rmtree(staging, ignore_errors=True)
    publication = build_publication(trainer, staging, repo_id, options)

    private = args.hub_private_repo if private is None else private
    sent: dict[str, Any] = {"private": private, "revision": revision or args.hub_revision, "tag": tag, "token": token}
    send = partial(publish, publication, commit_message=commit_message, **sent)
    if not blocking:
        return _in_background(trainer, staging, send)
    try:
        return send()
    finally:
        shutil.rmtree(staging, ignore_errors=True)


# The drafter's file is published as remote code, so it cannot import this one.
DFlashDraftModel.publisher = push_drafter


# --- The command.


@dataclass
class PublishArguments:
    drafter: str = field(metadata={"help": "Folder of the drafter, or of an adapter, which is merged."})
    repo_id: str = field(metadata={"help": "Repository on the Hub, OWNER/NAME."})
    base: str | None = field(
        default=None, metadata={"help": "Drafter of an adapter, where it is no longer where the adapter says."}
    )
    base_model: str | None = field(
        default=None, metadata={"help": "Hub id of the target; by default the one that the run recorded."}
    )
    adapted_from: str | None = field(
        default=None, metadata={"help": "Hub id of the drafter it was adapted from; by default the recorded one."}
    )
    results: str | None = field(
        default=None, metadata={"help": "results.json of `dflash-hf evaluate`; by default that in the folder."}
    )
    results_drafter: str | None = field(
        default=None, metadata={"help": "Name of the drafter in the results, where they are of several."}
    )
    plots: list[str] | None = field(default=None, metadata={"help": "Images; by default those in the folder."})
    license: str | None = field(default=None, metadata={"help": "Licence of the drafter, such as apache-2.0."})
    languages: list[str] | None = field(default=None, metadata={"help": "Languages of the training data: en de."})
    limits: list[str] | None = field(default=None, metadata={"help": "Further limits for the card, a sentence each."})
    private: bool | None = field(default=None, metadata={"help": "Whether a new repository is private."})
    revision: str | None = field(default=None, metadata={"help": "Branch; main if unset."})
    commit_message: str = field(default="Upload drafter", metadata={"help": "First line of the commit."})
    tag: str | None = field(default=None, metadata={"help": "Tag of the commit."})
    keep_card: bool = field(default=False, metadata={"help": "Leave the card that the repository has."})
    fp32: bool = field(default=False, metadata={"help": "Add the weights in fp32, in a folder of their own."})
    dry_run: bool = field(default=False, metadata={"help": "Show the files and the card, and send nothing."})
    output_dir: str | None = field(default=None, metadata={"help": "Keep the repository's files in this new folder."})


def main(argv: Sequence[str] | None = None) -> None:
    """Build the repository, show it, and send it unless this is a dry run."""
    description = (
        "Publish a trained drafter on the Hub: bf16 weights, code, card, results and plots, checked and in one commit."
    )
    sent = ("private", "revision", "commit_message", "tag", "keep_card")
    with tempfile.TemporaryDirectory() as temporary, errors_in_one_line("dflash-hf publish"):
        (args,) = parse_config(PublishArguments, argv, description=description, prog="dflash-hf publish")
        publication = _build(args, Path(args.output_dir or temporary))
        print(publication)
        if args.dry_run:
            card = (publication.folder / "README.md").read_text(encoding="utf-8")
            print(f"\n{card}\nNothing was sent (dry_run).")
        else:
            print(f"Published: {publish(publication, **{name: vars(args)[name] for name in sent})}")


def _build(args: PublishArguments, folder: Path) -> Publication:
    """All files of the repository."""
    source = Path(args.drafter)
    if is_adapter_folder(source):
        from .adapters import merge_adapter  # needs peft

        drafter = merge_adapter(source, args.base)
    elif args.base is not None:
        raise ValueError(f"base={args.base} is for the folder of an adapter, which {source} is not.")
    elif checkpoints_in(source) and not (source / CONFIG_NAME).is_file():
        newest = list(checkpoints_in(source).values())[-1]
        raise ValueError(f"{source} holds checkpoints and no drafter of its own. Give one of them, such as {newest}.")
    else:
        drafter = DFlashDraftModel.from_pretrained(str(source))
    found = [path for path in sorted(source.glob("*.png")) if path.name != PLOT_NAME]
    return build_repository(
        drafter,
        folder,
        args.repo_id,
        facts=read_facts(source),
        results=load_results(Path(args.results), args.results_drafter)
        if args.results
        else recorded_results(source, args.results_drafter),
        results_drafter=args.results_drafter,
        plots=found if args.plots is None else args.plots,
        options=CardOptions(
            base_model=args.base_model,
            adapted_from=args.adapted_from,
            license=args.license,
            languages=args.languages or (),
            limits=args.limits or (),
        ),
        fp32=args.fp32,
    )
