# SPDX-License-Identifier: Apache-2.0
"""Publish a trained drafter on the Hub: bf16 weights, code, card, results and plots, checked and in one commit.

    python recipes/publish.py --drafter outputs/drafter --repo_id OWNER/NAME --dry_run true
    python recipes/publish.py --drafter outputs/drafter --repo_id OWNER/NAME --base_model Qwen/Qwen3.6-27B

The access token comes from HF_TOKEN or `hf auth login`. A push that broke off is resumed by the same command.
"""

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from dflash_hf import DFlashDraftModel
from dflash_hf.checkpoint_files import is_adapter_folder
from dflash_hf.cli import parse_config
from dflash_hf.model_card import CardOptions, load_results, read_facts, recorded_results
from dflash_hf.publishing import PLOT_NAME, Publication, PublishError, build_repository, publish


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


def main() -> None:
    args = parse_config((PublishArguments,), description=__doc__.split("\n")[0])[0]
    with tempfile.TemporaryDirectory() as temporary:
        try:
            publication = build(args, Path(args.output_dir or temporary))
            print(publication)
            if args.dry_run:
                print(
                    f"\n{(publication.folder / 'README.md').read_text(encoding='utf-8')}\nNothing was sent (dry_run)."
                )
                return
            url = publish(
                publication,
                private=args.private,
                revision=args.revision,
                commit_message=args.commit_message,
                tag=args.tag,
                keep_card=args.keep_card,
            )
        except (ValueError, OSError, ImportError, PublishError) as error:
            raise SystemExit(f"{sys.argv[0]}: error: {error}") from None
    print(f"Published: {url}")


def build(args: PublishArguments, folder: Path) -> Publication:
    """All files of the repository."""
    source = Path(args.drafter)
    if args.results is None:
        results = recorded_results(source, args.results_drafter)
    else:
        results = load_results(Path(args.results), args.results_drafter)
    plots = [Path(plot) for plot in args.plots or []]
    if args.plots is None:
        plots = [path for path in sorted(source.glob("*.png")) if path.name != PLOT_NAME]
    options = CardOptions(
        base_model=args.base_model,
        adapted_from=args.adapted_from,
        license=args.license,
        languages=args.languages or (),
        limits=args.limits or (),
    )
    return build_repository(
        load(source, args.base),
        folder,
        args.repo_id,
        facts=read_facts(source),
        results=results,
        results_drafter=args.results_drafter,
        plots=plots,
        options=options,
        fp32=args.fp32,
    )


def load(folder: Path, base: str | None) -> DFlashDraftModel:
    """The drafter of a folder; that of an adapter is merged."""
    if not is_adapter_folder(folder):
        if base is not None:
            raise ValueError(f"base={base} has no effect on {folder}, which is no folder of an adapter. Leave it out.")
        return DFlashDraftModel.from_pretrained(str(folder))
    from dflash_hf.adapters import merge_adapter

    return merge_adapter(folder, base)


if __name__ == "__main__":
    main()
