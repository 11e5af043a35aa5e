# SPDX-License-Identifier: Apache-2.0
"""A small Hub on loopback that speaks the calls huggingface_hub makes to publish and to load, LFS included.

A repository is a list of commits, each a whole tree {path: content}; large files arrive as blobs by their sha256 and
are named by a commit later, as on the real one.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml


@dataclass
class Repository:
    private: bool = False
    commits: list[tuple[str, str, dict[str, bytes]]] = field(default_factory=list)  # (oid, message, tree)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def oid(self, revision: str) -> str | None:
        named = {**self.tags, **self.branches}
        return named.get(revision) or next((oid for oid, *_ in self.commits if oid == revision), None)

    def known(self, revision: str) -> str:
        """The commit of a revision, or the Hub's own error."""
        oid = self.oid(revision)
        if oid is None:
            raise Answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid

    def tree(self, revision: str = "main") -> dict[str, bytes]:
        oid = self.oid(revision)
        return next((tree for name, _, tree in self.commits if name == oid), {})

    def commit(self, branch: str, message: str, tree: dict[str, bytes]) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits.append((oid, message, tree))
        self.branches[branch] = oid
        return oid


class HubServer(ThreadingHTTPServer):
    """`with HubServer() as hub:` serves at `hub.url`; `fail` breaks calls.

    Args of `fail`: (method, part of the path) -> status to answer, or "cut" to close the connection in the middle.
    """

    daemon_threads = True
    # Which token belongs to whom, and who may write where.
    users = {"hf_writer": "me", "hf_reader": "reader"}  # noqa: RUF012
    writers = {"hf_writer": {"me", "team"}}  # noqa: RUF012

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.fail: dict[tuple[str, str], int | str] = {}
        self.calls: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        # Cleared, it holds up every call until it is set.
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.shutdown()
        self.thread.join()
        self.server_close()

    def count(self, method: str, part: str) -> int:
        return sum(m == method and part in path for m, path in self.calls)


class Answer(Exception):
    def __init__(self, status: int, message: str = "", code: str | None = None):
        self.status, self.message, self.code = status, message, code


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *args):
        pass

    def answer(self) -> None:
        method, path = self.command, unquote(urlsplit(self.path).path)
        self.server.may_go_on.wait(30)
        with self.server.lock:
            self.server.calls.append((method, path))
        failing = [what for (verb, part), what in self.server.fail.items() if verb == method and part in path]
        if failing == ["cut"]:
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.read()
        try:
            if failing:
                raise Answer(int(failing[0]), "broken on purpose")
            for verb, pattern, handle in ROUTES:
                found = re.fullmatch(pattern, path)
                if verb == method and found:
                    handle(self, body, *found.groups())
                    return
            raise Answer(404, f"no route for {method} {path}")
        except Answer as error:
            self.send_json({"error": error.message}, error.status, error.code)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send_json(self, value, status: int = 200, code: str | None = None) -> None:
        self.send(json.dumps(value).encode(), status, {"X-Error-Code": code} if code else {}, "application/json")

    def send(self, content: bytes, status: int = 200, headers=None, kind: str = "application/octet-stream") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # Who asks

    @property
    def token(self) -> str | None:
        words = self.headers.get("Authorization", "").split()
        return words[1] if len(words) == 2 else None

    def user(self) -> str:
        if self.token not in self.server.users:
            raise Answer(401, "Invalid username or password.")
        return self.server.users[self.token]

    def check_write(self, owner: str) -> None:
        self.user()
        if owner not in self.server.writers.get(self.token, set()):
            raise Answer(403, f"You don't have the rights to write under the namespace {owner}")

    def repository(self, name: str, write: bool = False) -> Repository:
        repository, owner = self.server.repositories.get(name), name.split("/")[0]
        hidden = repository is not None and repository.private and owner not in self.server.writers.get(self.token, ())
        if repository is None or hidden:
            raise Answer(404, "Repository not found", "RepoNotFound")
        if write:
            self.check_write(owner)
        return repository


def whoami(self, body):
    name = self.user()
    self.send_json({"type": "user", "name": name, "orgs": [], "auth": {"type": "access_token"}})


def create(self, body):
    asked = json.loads(body)
    owner = asked.get("organization") or self.user()
    name = f"{owner}/{asked['name']}"
    self.check_write(owner)
    if name in self.server.repositories:
        self.send_json({"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}, 409)
        return
    repository = self.server.repositories[name] = Repository(
        asked.get("visibility") == "private" or bool(asked.get("private"))
    )
    repository.commit("main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
    self.send_json({"url": f"{self.server.url}/{name}", "name": name})


def info(self, body, name, revision=None):
    repository = self.repository(name)
    oid = repository.known(revision or "main")
    siblings = [{"rfilename": path} for path in repository.tree(oid)]
    self.send_json({"id": name, "sha": oid, "private": repository.private, "siblings": siblings, "tags": []})


def entry(path: str, content: bytes) -> dict:
    value = {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
    if is_large(path):
        value["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return value


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".png"))


def etag_of(path: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if is_large(path) else git_oid(content)


def tree(self, body, name, revision, folder=None):
    repository = self.repository(name)
    oid = repository.known(revision)
    self.send_json([entry(path, content) for path, content in repository.tree(oid).items()])


def refs(self, body, name):
    repository = self.repository(name)
    both = {"branches": ("heads", repository.branches), "tags": ("tags", repository.tags)}
    listed = {
        kind: [{"name": n, "ref": f"refs/{prefix}/{n}", "targetCommit": oid} for n, oid in values.items()]
        for kind, (prefix, values) in both.items()
    }
    self.send_json({**listed, "converts": []})


def branch(self, body, name, new):
    repository = self.repository(name, write=True)
    start = (json.loads(body) if body else {}).get("startingPoint") or "main"
    repository.branches[new] = repository.oid(start)
    self.send_json({})


def tag(self, body, name, revision):
    repository = self.repository(name, write=True)
    repository.tags[json.loads(body)["tag"]] = repository.oid(revision)
    self.send_json({})


def validate_yaml(self, body):
    content = json.loads(body)["content"]
    found = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    data = yaml.safe_load(found[1]) if found else None
    texts = [(data or {}).get(name, "") for name in ("license", "library_name")]
    is_valid = isinstance(data, dict) and all(isinstance(text, str) for text in texts)
    errors = [] if is_valid else [{"message": "no metadata, or a licence or library that is no text"}]
    self.send_json({"errors": errors, "warnings": []}, 400 if errors else 200)


def preupload(self, body, name, revision):
    repository = self.repository(name, write=True)
    present = repository.tree(repository.known(revision))
    files = []
    for file in json.loads(body)["files"]:
        path = file["path"]
        oid = etag_of(path, present[path]) if path in present else None
        mode = "lfs" if is_large(path) else "regular"
        files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    self.send_json({"files": files})


def lfs_batch(self, body, name):
    repository = self.repository(name, write=True)
    objects = []
    for asked in json.loads(body)["objects"]:
        oid, size = asked["oid"], asked["size"]
        known = oid in repository.blobs
        actions = {
            "upload": {"href": f"{self.server.url}/lfs/{name}/{oid}", "header": {}},
            "verify": {"href": f"{self.server.url}/lfs-verify/{name}", "header": {}},
        }
        objects.append({"oid": oid, "size": size, **({} if known else {"actions": actions})})
    self.send_json({"transfer": "basic", "objects": objects})


def lfs_put(self, body, name, oid):
    if hashlib.sha256(body).hexdigest() != oid:
        raise Answer(400, "the content has another sha256")
    self.server.repositories[name].blobs[oid] = body
    self.send(b"")


def lfs_verify(self, body, name):
    asked = json.loads(body)
    blob = self.repository(name, write=True).blobs.get(asked["oid"])
    if blob is None or len(blob) != asked["size"]:
        raise Answer(404, "no such object")
    self.send_json({})


def commit(self, body, name, revision):
    repository = self.repository(name, write=True)
    lines = [json.loads(line) for line in body.splitlines()]
    files, message = dict(repository.tree(revision)), ""
    for line in lines:
        key, value = line["key"], line["value"]
        if key == "header":
            message = value["summary"]
        elif key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            if value["oid"] not in repository.blobs:
                raise Answer(400, f"LFS pointer of {value['path']} points to a file that does not exist")
            files[value["path"]] = repository.blobs[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]
        else:
            raise Answer(400, f"unknown operation {key}")
    oid = repository.commit(revision, message, files)
    url = f"{self.server.url}/{name}/commit/{oid}"
    self.send_json({"success": True, "commitUrl": url, "commitOid": oid, "pullRequestUrl": None})


def resolve(self, body, name, revision, path):
    repository = self.repository(name)
    oid = repository.known(revision)
    files = repository.tree(oid)
    headers = {"X-Repo-Commit": oid, "Accept-Ranges": "bytes"}
    if path not in files:
        self.send(b"", 404, {"X-Error-Code": "EntryNotFound", **headers})
        return
    content = files[path]
    headers["ETag"] = etag = f'"{etag_of(path, content)}"'
    if is_large(path):
        headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": etag}
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
    if asked:
        first, last = int(asked[1]), int(asked[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        self.send(content[first : last + 1], 206, headers)
    else:
        self.send(content, 200, headers)


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("GET", f"/api/models/{REPO}", info),
    ("GET", f"/api/models/{REPO}/revision/(.+)", info),
    ("GET", f"/api/models/{REPO}/tree/([^/]+)(?:/(.*))?", tree),
    ("GET", f"/api/models/{REPO}/refs", refs),
    ("POST", f"/api/models/{REPO}/branch/(.+)", branch),
    ("POST", f"/api/models/{REPO}/tag/(.+)", tag),
    ("POST", f"/api/models/{REPO}/preupload/(.+)", preupload),
    ("POST", f"/api/models/{REPO}/commit/(.+)", commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", lfs_batch),
    ("PUT", f"/lfs/{REPO}/(.+)", lfs_put),
    ("POST", f"/lfs-verify/{REPO}", lfs_verify),
    *((verb, f"/{REPO}/resolve/([^/]+)/(.+)", resolve) for verb in ("GET", "HEAD")),
]
