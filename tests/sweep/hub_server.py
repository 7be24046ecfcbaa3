"""A Hub on 127.0.0.1: refs, trees, files with ranges and LFS hashes, for the real client; and
faults on demand.
"""

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub.utils.sha import git_hash

LFS_SUFFIXES = (".safetensors", ".bin")


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections of several sweeps at once
    daemon_threads = True


class Hub:
    """Repositories in memory.

    ``repositories``: name -> {"branches": {name: commit}, "tags": …}; ``commits``: commit -> {path:
    bytes}. ``faults``: (path in a repository or "tree", commit) -> a list of faults, used up from
    the front: a status (int), "cut" (half of the body), "stall" (half of the body, then silence),
    "wrong" (other bytes of the same length). ``requests`` counts (method, what, commit).
    """

    def __init__(self):
        self.repositories = {}
        self.commits = {}
        self.faults = {}
        self.requests = Counter()
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def add(self, repository, revision, files, kind="branches"):
        """Add a revision; returns its commit."""
        refs = self.repositories.setdefault(repository, {"branches": {}, "tags": {}})
        commit = hashlib.sha1(f"{repository}/{revision}".encode()).hexdigest()
        refs[kind][revision] = commit
        self.commits[commit] = dict(files)
        return commit

    def fail(self, what, commit, *faults):
        self.faults[what, commit] = list(faults)

    def downloads(self, suffix=".safetensors"):
        """How often each commit's files that end in ``suffix`` were downloaded."""
        return Counter(
            {
                commit: n
                # a request may come in meanwhile
                for (method, what, commit), n in list(self.requests.items())
                if method == "GET" and what.endswith(suffix)
            }
        )


def _entry(path, data):
    entry = {
        "type": "file",
        "path": path,
        "size": len(data),
        "oid": git_hash(data),
    }
    if path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {
            "oid": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "pointerSize": 130,
        }
    return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        self.server.hub.requests["POST", self.path, ""] += 1
        self._send(404, {"error": "no"})

    def do_HEAD(self):
        self._serve()

    def do_GET(self):
        self._serve()

    def _serve(self):
        path = unquote(urlsplit(self.path).path)
        try:
            if path.startswith("/api/datasets/"):
                self._dataset(path.removeprefix("/api/"))
            elif path.startswith("/api/models/"):
                self._api(path.removeprefix("/api/models/"))
            else:
                repository, _, rest = path.strip("/").partition("/resolve/")
                commit, _, name = rest.partition("/")
                self._file(repository, commit, name)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def _api(self, rest):
        if rest.endswith("/refs"):
            refs = self.server.hub.repositories.get(rest.removesuffix("/refs"))
            if self._faulty("refs", ""):
                return
            if refs is None:
                self._missing("Repo")
                return
            listed = {
                kind: [
                    {"name": n, "ref": f"refs/x/{n}", "targetCommit": c}
                    for n, c in refs[kind].items()
                ]
                for kind in ("branches", "tags")
            }
            self._send(200, {**listed, "converts": []})
            return
        name, _, about = rest.partition("/revision/")  # which older transformers ask for
        _, _, commit = rest.partition("/tree/")
        commit = (about or commit).strip("/")
        if not about and self._faulty("tree", commit):
            return
        if commit not in self.server.hub.commits:
            self._missing("Revision")
            return
        if about:
            files = [{"rfilename": path} for path in sorted(self.server.hub.commits[commit])]
            self._send(200, {"id": name, "sha": commit, "siblings": files})
            return
        self._send(
            200,
            [_entry(path, data) for path, data in sorted(self.server.hub.commits[commit].items())],
        )

    def _dataset(self, rest):
        """Of a repository ``datasets/author/name``, whose branch is ``main``."""
        name, _, tree = rest.partition("/tree/")
        found = self.server.hub.repositories.get(name.partition("/revision/")[0])
        _, _, folder = tree.partition("/")
        if found is None:
            self._missing("Repo")
            return
        head = found["branches"]["main"]
        files = {
            path: data
            for path, data in self.server.hub.commits[head].items()
            if path.startswith(folder)
        }
        if tree and not files:
            self._missing("Entry")
        elif tree:
            self._send(200, [_entry(path, data) for path, data in sorted(files.items())])
        else:
            self._send(200, {"id": name.removeprefix("datasets/"), "sha": head, "siblings": []})

    def _file(self, repository, commit, name):
        self.server.hub.requests[self.command, name, commit] += 1
        data = self.server.hub.commits.get(commit, {}).get(name)
        if data is None:
            self._missing("Entry")
            return
        entry = _entry(name, data)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            self._send(200, data, headers)
            return
        fault = self._next_fault(name, commit)
        if isinstance(fault, int):
            self._send(fault, {"error": "injected"})
            return
        start, stop = 0, len(data)
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last or len(data)) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        body = data[start:stop]
        if fault == "wrong":
            body = body[:-8] + bytes(255 - b for b in body[-8:])
        self.send_response(206 if "Content-Range" in headers else 200)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if fault in ("cut", "stall"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "stall":
                threading.Event().wait(6)
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(body)

    def _next_fault(self, what, commit):
        pending = self.server.hub.faults.get((what, commit), [])
        return pending.pop(0) if pending else None

    def _faulty(self, what, commit):
        self.server.hub.requests[self.command, what, commit] += 1
        status = self._next_fault(what, commit)
        if status is not None:
            self._send(status, {"error": "injected"})
        return status is not None

    def _missing(self, what):
        self._send(404, {"error": "not found"}, {"X-Error-Code": f"{what}NotFound"})

    def _send(self, status, body, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
