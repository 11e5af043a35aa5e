# SPDX-License-Identifier: Apache-2.0
"""The console command `dflash-hf`."""

import argparse
import json
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dflash-hf SUBCOMMAND ...`.

    Args:
        argv: The words after the command's name; None reads those of the process.

    Returns:
        Exit status: 0, or 1 where a checkpoint has errors. Bad usage ends the process with 2.
    """
    parser = argparse.ArgumentParser(prog="dflash-hf", description="Tools for DFlash drafters.", allow_abbrev=False)
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    _add_validate(subcommands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        parser.error(str(error))


def _add_validate(subcommands) -> None:
    parser = subcommands.add_parser(
        "validate",
        help="check what vLLM, SGLang, dflash and transformers each need of a drafter",
        description="Check a drafter's config.json and tensor headers against what each of its readers needs, and "
        "print the serving command for each. The weights of a local folder are looked through for NaN, those of a "
        "repository are not fetched. Exit status: 0 without errors, 1 with errors.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="FOLDER_OR_REPO", help="a local folder or a repository of the Hub")
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_validate)


def _validate(args: argparse.Namespace) -> int:
    from .validate import validate_checkpoint

    report = validate_checkpoint(args.checkpoint, revision=args.revision)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
