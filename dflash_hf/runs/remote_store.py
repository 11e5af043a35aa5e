# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at an fsspec address (`s3://`, `gs://`, ...): complete once their manifest, written last, is there.

Credentials come from where the file system's own package looks for them (environment, configuration files, roles);
they are no part of an address. Nothing that is fetched is unpickled without `weights_only`.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from transformers.utils import logging

from ..data.addresses import describe, is_remote, refuse_credentials
from .checkpoint_manifest import MANIFEST_NAME, files_of, make_manifest, manifest_problems
from .checkpointing import ASIDE_PREFIX, DiskSpaceError, check_disk_space, publish, step_of


logger = logging.get_logger(__name__)

# Protocols without folders, where making one may make the bucket: one that is gone must not come back in silence.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "r2", "memory"}


def check_address(address: str) -> None:
    """Raises for an address that carries credentials, names no place, or whose protocol no installed package serves.

    Raises:
        ValueError: Without repeating what may be a secret.
        ImportError: Naming the package to install.
    """
    refuse_credentials(address)
    protocol, _, rest = address.partition("://")
    if not is_remote(address) or address != address.strip() or not rest.strip("/"):
        raise ValueError(
            f"{address!r} is no address of checkpoints; expected one such as s3://bucket/run, gs://bucket/run or "
            "file:///folder, without spaces around it."
        )
    fsspec.get_filesystem_class(protocol)


class Heartbeat(fsspec.Callback):
    """Knows when a file system last said that some bytes of a copy have gone."""

    def __init__(self) -> None:
        super().__init__()
        self.last = time.monotonic()

    def call(self, *args: Any, **kwargs: Any) -> None:
        self.last = time.monotonic()


def upload_checkpoint(
    folder: Path,
    address: str,
    keep_on: Callable[[], bool] = lambda: True,
    heartbeat: Heartbeat | None = None,
) -> None:
    """Copy a complete checkpoint to `<address>/<its name>`, its manifest with hashes last.

    Args:
        folder: The local checkpoint, complete.
        address: Of the folder of checkpoints.
        keep_on: Asked before each file; False gives up.
        heartbeat: Told of every part that has gone.

    Raises:
        Exception: Whatever the file system raises; then no manifest is there.
    """
    system, root = fsspec.core.url_to_fs(f"{address.rstrip('/')}/{folder.name}")
    heartbeat = heartbeat or Heartbeat()
    manifest = make_manifest(folder, with_hashes=True)
    # Listings are cached, and another process may have written since.
    system.invalidate_cache()
    if system.exists(f"{root}/{MANIFEST_NAME}"):
        system.rm_file(f"{root}/{MANIFEST_NAME}")
    for name, entry in manifest["files"].items():
        if not keep_on():
            raise InterruptedError(f"{folder.name} is not wanted any more")
        if address.partition("://")[0] not in OBJECT_STORES:
            system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        heartbeat.call()
        system.put_file(str(folder / name), f"{root}/{name}", callback=heartbeat)
        size = system.info(f"{root}/{name}")["size"]
        if size != entry["size"]:
            raise OSError(f"{name} arrived with {size} bytes instead of {entry['size']}")
    system.pipe_file(f"{root}/{MANIFEST_NAME}", json.dumps(manifest, indent=1).encode())


def remote_steps(address: str) -> list[int]:
    """Steps of the checkpoints at an address that have a manifest, ascending."""
    system, root = fsspec.core.url_to_fs(address.rstrip("/"))
    system.invalidate_cache()
    steps = []
    for path in system.ls(root, detail=False) if system.exists(root) else []:
        step = step_of(path.rstrip("/"))
        if step is not None and system.exists(f"{path.rstrip('/')}/{MANIFEST_NAME}"):
            steps.append(step)
    return sorted(steps)


def fetch_checkpoint(address: str, output_dir: str | Path) -> Path:
    """Copy a checkpoint from an address into a folder, checked by its hashes.

    Args:
        address: Of one checkpoint-N, or of a folder of them, of which the newest complete one is taken.
        output_dir: Where `checkpoint-N` is put, unless the same one is there already.

    Returns:
        The local checkpoint.

    Raises:
        ValueError: There is none, or it is incomplete.
        OSError: The store does not answer.
    """
    try:
        return _fetch(address.rstrip("/"), Path(output_dir))
    except (ValueError, DiskSpaceError):
        raise
    # Each store has its own errors, which may name credentials.
    except Exception as error:
        raise OSError(f"The checkpoint at {address} could not be fetched: {describe(error)}") from None


def _fetch(address: str, output_dir: Path) -> Path:
    if step_of(address) is None:
        steps = remote_steps(address)
        if not steps:
            raise ValueError(
                f"{address} holds no complete checkpoint: no checkpoint-N with a {MANIFEST_NAME}. Look at the "
                "address, or leave resume_from_checkpoint out to start anew."
            )
        address = f"{address}/checkpoint-{steps[-1]}"
    system, root = fsspec.core.url_to_fs(address)
    try:
        manifest = system.cat_file(f"{root}/{MANIFEST_NAME}")
    except FileNotFoundError:
        raise ValueError(f"{address} has no {MANIFEST_NAME}, which is written last: it is incomplete.") from None
    try:
        files = files_of(manifest)
    except ValueError as error:
        raise ValueError(f"The {MANIFEST_NAME} of {address} cannot be read ({error}). Take an older one.") from None
    final = output_dir / Path(root).name
    if _is_there(final, files):
        logger.warning(f"{final} is the same as {address} and used.")
        return final
    output_dir.mkdir(parents=True, exist_ok=True)
    check_disk_space(output_dir, sum(entry["size"] for entry in files.values()))
    aside = final.with_name(f"{ASIDE_PREFIX}{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _download(system, root, files, aside)
        (aside / MANIFEST_NAME).write_bytes(manifest)
        problems = manifest_problems(aside)
        if problems:
            raise ValueError(f"{address} is not what its manifest says: {'; '.join(problems)}. Take an older one.")
        if final.exists():
            logger.warning(f"{final} is not the same as {address}, which takes its place.")
        publish(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _download(system: Any, root: str, files: dict[str, Any], folder: Path) -> None:
    for name in files:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"The manifest of {root} names {name!r}, which is outside the checkpoint.")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            system.get_file(f"{root}/{name}", str(path))
        except FileNotFoundError:
            raise ValueError(f"{root} is incomplete: {name} is missing. Take an older one.") from None


def _is_there(folder: Path, files: dict[str, Any]) -> bool:
    if not folder.is_dir() or manifest_problems(folder):
        return False
    return make_manifest(folder, with_hashes=True)["files"] == files


__all__ = ["check_address", "fetch_checkpoint", "remote_steps", "upload_checkpoint"]
