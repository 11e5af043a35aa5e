# SPDX-License-Identifier: Apache-2.0
"""Completions and documents in object stores: S3 over HTTP on loopback, and the file systems of fsspec."""

import json
import logging

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from moto.backends import get_backend
from moto.server import ThreadedMotoServer
from tiny import byte_tokenizer

from dflash_hf.chats import list_files
from dflash_hf.documents import OutputError, open_documents
from dflash_hf.tokenizing import TokenizeOptions, load_documents, read_completions, tokenize_files


NUM_FILES = 1805
TOKENIZER = byte_tokenizer()


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def line(number: int) -> bytes:
    return json.dumps(chat(f"question {number}", f"answer {number}")).encode() + b"\n"


@pytest.fixture(scope="module")
def s3():
    """The storage options of an S3 server, and what puts an object into it without a request."""
    server = ThreadedMotoServer(port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "client_kwargs": {"region_name": "us-east-1"}}
    backend = get_backend("s3")["123456789012"]["aws"]
    for bucket in ("many", "few", "out"):
        backend.create_bucket(bucket, "us-east-1")
    yield options, lambda bucket, key, value: backend.put_object(bucket, key, value)
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    # A file system that is cached by its arguments would go on with the keys of another test.
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def answers(documents) -> list[str]:
    return sorted(
        TOKENIZER.decode(row["input_ids"][start:stop]) for row in documents for start, stop in row["supervised_spans"]
    )


@pytest.fixture(scope="module")
def many(s3):
    options, put = s3
    for number in range(NUM_FILES):
        put("many", f"answers/{number % 7}/part-{number:04}.jsonl", line(number))
    return options


def test_1805_small_files_are_listed_over_several_pages(many):
    files = list_files("s3://many/answers", many)
    assert len(files) == NUM_FILES > 1000  # what one page of a listing holds
    assert [file.name for file in files] == sorted(file.name for file in files)
    assert all(file.size == len(line(int(file.name[-10:-6]))) and len(file.version) == 32 for file in files)
    assert [file.name for file in list_files("s3://many/answers/0/*.jsonl", many)][:2] == [
        "part-0000.jsonl",
        "part-0007.jsonl",
    ]


@pytest.mark.parametrize(
    ("folder", "numbers"),
    [("/0", range(0, 1000, 7)), pytest.param("", range(NUM_FILES), marks=pytest.mark.slow)],
)
def test_dt10_files_of_a_bucket_are_read_and_written_back(many, s3, tmp_path, folder, numbers):
    address, output = f"s3://many/answers{folder}", f"s3://out/many{folder}"
    if folder:
        address += "/part-0*"
    manifest = tokenize_files(address, output, TOKENIZER, storage_options=many, num_proc=2, disable_tqdm=True)
    assert manifest["complete"] and len(manifest["files"]) == len(numbers)
    assert manifest["documents"] == {"train": len(numbers)}
    documents = open_documents(output, storage_options=many, cache_dir=str(tmp_path))
    assert answers(documents) == sorted(f"answer {number}<|im_end|>" for number in numbers)
    assert documents["source"][:2] == ["part-0000", "part-0007"]
    # Started again, nothing is read: the shards say that they are finished.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    again = tokenize_files(address, output, TOKENIZER, storage_options=many, disable_tqdm=True)
    assert again == manifest


def test_a_file_that_fails_is_retried_then_named_and_the_rest_is_finished(s3, monkeypatch, tmp_path):
    options, put = s3
    for number in range(4):
        put("few", f"a/{number}.jsonl", line(number))
    s3fs = fsspec.get_filesystem_class("s3")
    opened: list[str] = []
    original = s3fs._cat_file

    async def fails(self, path, **kwargs):
        opened.append(path)
        if path.endswith("2.jsonl") or (path.endswith("1.jsonl") and opened.count(path) < 2):
            raise OSError("connection reset")
        return await original(self, path, **kwargs)

    monkeypatch.setattr(s3fs, "_cat_file", fails)
    run = {"storage_options": options, "disable_tqdm": True, "retry_wait": 0.0, "retries": 2}
    manifest = tokenize_files("s3://few/a", "s3://out/few", TOKENIZER, **run)
    assert opened.count("few/a/2.jsonl") == 3 and opened.count("few/a/1.jsonl") == 2
    assert not manifest["complete"]
    assert [file["name"] for file in manifest["files"]] == ["0.jsonl", "1.jsonl", "3.jsonl"]
    assert list(manifest["failed"]) == ["2.jsonl"]
    error = manifest["failed"]["2.jsonl"]
    assert "s3://few/a/2.jsonl" in error and "connection reset" in error
    monkeypatch.setattr(s3fs, "_cat_file", original)
    s3fs.clear_instance_cache()
    opened.clear()
    manifest = tokenize_files("s3://few/a", "s3://out/few", TOKENIZER, **run)
    assert manifest["complete"] and manifest["documents"] == {"train": 4}


def test_missing_credentials_and_addresses_are_explained(s3, monkeypatch):
    options, _ = s3
    with pytest.raises(FileNotFoundError, match="s3://few/nowhere"):
        tokenize_files("s3://few/nowhere", "s3://out/x", TOKENIZER, storage_options=options)
    with pytest.raises(FileNotFoundError, match="s3://no-such-bucket"):
        tokenize_files("s3://no-such-bucket/a", "s3://out/x", TOKENIZER, storage_options=options)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(OSError, match=r"Listing s3://few/a failed \(NoCredentialsError.*AWS_ACCESS_KEY_ID"):
        list_files("s3://few/a", options)
    with pytest.raises(ValueError, match=r"pip install 'dflash_hf\[gcs\]'|Protocol not known|gcsfs"):
        list_files("nosuch://few/a")


class KeyedFileSystem(MemoryFileSystem):
    """A file system that asks for a key, to see that every call hands it on."""

    protocol = "keyed"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    def __init__(self, key=None, **kwargs):
        super().__init__(**kwargs)
        if key != "secret":
            raise PermissionError(f"the key is {key!r}")

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("keyed://"))


def test_dt10_storage_options_reach_every_call(tmp_path):
    fsspec.register_implementation("keyed", KeyedFileSystem, clobber=True)
    options = {"key": "secret"}
    fs = KeyedFileSystem(**options)
    fs.pipe("/in/a.jsonl", line(1) + line(2))
    fs.pipe("/in/b.jsonl", line(3))
    manifest = tokenize_files(
        "keyed://in",
        "keyed://out",
        TOKENIZER,
        TokenizeOptions(eval_fraction=0.4),
        storage_options=options,
        disable_tqdm=True,
    )
    assert sum(manifest["documents"].values()) == 3
    splits = [
        load_documents("keyed://out", TOKENIZER, split, storage_options=options) for split in manifest["documents"]
    ]
    assert answers([row for split in splits for row in split]) == [f"answer {i}<|im_end|>" for i in (1, 2, 3)]
    assert len(read_completions("keyed://in", storage_options=options)) == 3
    for call in (lambda: list_files("keyed://in"), lambda: open_documents("keyed://out")):
        with pytest.raises((OSError, ValueError), match="the key is None"):
            call()
    assert "secret" not in json.dumps(manifest)


def test_a_full_store_ends_the_run_and_what_is_finished_stays(monkeypatch):
    fs = MemoryFileSystem()
    for number in range(3):
        fs.pipe(f"/full/in/{number}.jsonl", line(number))
    put_file = MemoryFileSystem.put_file
    stored: list[str] = []

    def full(self, local, remote, **kwargs):
        if len(stored) == 2:
            raise OSError(28, "No space left on device")
        stored.append(remote)
        return put_file(self, local, remote, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", full)
    with pytest.raises(OutputError, match=r"Writing to .*/full/out failed.*No space left.*same command"):
        tokenize_files("memory://full/in", "memory://full/out", TOKENIZER, disable_tqdm=True)
    assert stored == ["/full/out/settings.json", "/full/out/train/0.jsonl.parquet"]
    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    manifest = tokenize_files("memory://full/in", "memory://full/out", TOKENIZER, disable_tqdm=True)
    assert manifest["documents"] == {"train": 3}
