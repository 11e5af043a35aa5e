# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: its files with sizes and checksums, by which a complete one is known."""

import hashlib
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


MANIFEST_NAME = "checkpoint_manifest.json"
# A pickle of the arguments that nothing here reads again.
UNLISTED = (MANIFEST_NAME, "training_args.bin")
# A checksum is that of so many bytes, so that threads compute those of a large file side by side.
PART_BYTES = 2**28
NUM_THREADS = 8


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def crc32_of(path: Path) -> list[str]:
    """The CRC-32 in hexadecimal of each 256 MiB of the file: fast enough for the 20 GB of a checkpoint."""
    starts = range(0, max(path.stat().st_size, 1), PART_BYTES)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(lambda start: _crc32(path, start, PART_BYTES), starts))


def _crc32(path: Path, start: int, length: int) -> str:
    checksum = 0
    with path.open("rb") as file:
        file.seek(start)
        while part := file.read(min(2**22, length)):
            checksum = zlib.crc32(part, checksum)
            length -= len(part)
    return f"{checksum:08x}"


def _has_crc32(path: Path, expected: str | list[str]) -> bool:
    # Earlier versions wrote that of the whole file.
    return expected == (_crc32(path, 0, path.stat().st_size) if isinstance(expected, str) else crc32_of(path))


def make_manifest(folder: Path, with_hashes: bool = False) -> dict[str, Any]:
    """Names, sizes in bytes and checksums of the files of a checkpoint; hashes where they travel."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in UNLISTED):
        entry: dict[str, Any] = {"size": path.stat().st_size}
        if with_hashes:
            entry["sha256"] = sha256_of(path)
        else:
            entry["crc32"] = crc32_of(path)
        files[path.relative_to(folder).as_posix()] = entry
    return {"format": 1, "files": files}


def files_of(manifest: str | bytes) -> dict[str, dict[str, Any]]:
    """The files that the text of a manifest lists, each with its size in bytes.

    Raises:
        ValueError: It is no manifest, or lists nothing.
    """
    content = json.loads(manifest)
    files = content.get("files") if isinstance(content, dict) else None
    if not files or not isinstance(files, dict):
        raise ValueError("it lists no files")
    if not all(isinstance(entry, dict) and isinstance(entry.get("size"), int) for entry in files.values()):
        raise ValueError("it has no size of a file")
    return files


def manifest_problems(folder: str | Path) -> list[str]:
    """What is wrong with a checkpoint by its manifest, one sentence each; nothing for a complete one."""
    folder = Path(folder)
    try:
        files = files_of((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [f"it has no {MANIFEST_NAME}, which is written last"]
    except ValueError:
        return [f"its {MANIFEST_NAME} cannot be read"]
    except OSError as error:
        return [f"its {MANIFEST_NAME} cannot be read ({error.strerror})"]
    return [problem for name, entry in files.items() if (problem := _file_problem(folder / name, name, entry))]


def _file_problem(path: Path, name: str, entry: dict[str, Any]) -> str | None:
    try:
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['size']}"
        if "sha256" in entry and sha256_of(path) != entry["sha256"]:
            return f"{name} has another hash"
        if "crc32" in entry and not _has_crc32(path, entry["crc32"]):
            return f"{name} has another checksum"
    except OSError as error:
        # Such as a bad sector, or a file of another user.
        return f"{name} cannot be read ({error.strerror})"
    return None


__all__ = ["MANIFEST_NAME", "files_of", "make_manifest", "manifest_problems", "sha256_of"]
