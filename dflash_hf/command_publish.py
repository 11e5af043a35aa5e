# SPDX-License-Identifier: Apache-2.0
"""Publish a trained drafter on the Hub: bf16 weights, code, card, results and plots, checked and in one commit.

    dflash-hf publish --drafter outputs/drafter --repo_id OWNER/NAME --dry_run true
    dflash-hf publish --drafter outputs/drafter --repo_id OWNER/NAME --base_model Qwen/Qwen3.6-27B

The access token comes from HF_TOKEN or `hf auth login`. A push that broke off is resumed by the same command.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .checkpoint_files import is_adapter_folder
from .cli import errors_in_one_line, parse_config
from .model_card import CardOptions, load_results, read_facts, recorded_results
from .modeling_dflash import DFlashDraftModel
from .publishing import PLOT_NAME, Publication, build_repository, publish


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
    description = (__doc__ or "").split("\n")[0]
    sent = ("private", "revision", "commit_message", "tag", "keep_card")
    with tempfile.TemporaryDirectory() as temporary, errors_in_one_line("dflash-hf publish"):
        (args,) = parse_config(PublishArguments, argv, description=description, prog="dflash-hf publish")
        publication = build(args, Path(args.output_dir or temporary))
        print(publication)
        if args.dry_run:
            card = (publication.folder / "README.md").read_text(encoding="utf-8")
            print(f"\n{card}\nNothing was sent (dry_run).")
        else:
            print(f"Published: {publish(publication, **{name: vars(args)[name] for name in sent})}")


def build(args: PublishArguments, folder: Path) -> Publication:
    """All files of the repository."""
    source = Path(args.drafter)
    if is_adapter_folder(source):
        from .adapters import merge_adapter  # needs peft

        drafter = merge_adapter(source, args.base)
    elif args.base is not None:
        raise ValueError(f"base={args.base} is for the folder of an adapter, which {source} is not.")
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
