"""The Hub, as far as huggingface_hub's client needs it: repositories in memory, behind HTTP on the loopback interface.

What it answers was read off the client's requests. Faults can be put in the way of any request.
"""

import asyncio
import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from urllib.parse import unquote

import yaml
from aiohttp import web
from huggingface_hub import ModelCardData, constants, hf_api
from huggingface_hub.repocard_data import model_index_to_eval_results
from transformers.utils import hub as transformers_hub


TOKENS = {"hf_owner": "owner", "hf_other": "other"}
LFS = (".safetensors", ".png", ".bin")
ZERO = "0" * 40


def client_settings(url, cache):
    """Settings of huggingface_hub's client, each as an object, an attribute and its value, to use the Hub at `url`."""
    return [
        (constants, "HF_HUB_OFFLINE", False),
        (constants, "ENDPOINT", url),
        (constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"),
        (constants, "HF_HUB_DISABLE_XET", True),
        (constants, "HF_HUB_CACHE", str(cache)),
        (constants, "HF_TOKEN_PATH", str(cache / "token")),
        (hf_api.api, "endpoint", url),  # of the client made at import, for PEFT
        (transformers_hub, "_hf_api", None),  # transformers' own client, made once
    ]


@dataclass
class Repo:
    """One repository: every commit's files, and where the branches and tags are."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)  # commit, message
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files, message="commit", branch="main"):
        content = json.dumps(
            [len(self.log), message, sorted((p, hashlib.sha1(b).hexdigest()) for p, b in files.items())]
        )
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.log.append((sha, message))
        self.branches[branch] = sha
        return sha

    def find(self, revision):
        revision = unquote(revision)
        return (
            self.branches.get(revision) or self.tags.get(revision) or (revision if revision in self.commits else None)
        )

    @property
    def files(self):
        return self.commits[self.branches["main"]]


@dataclass
class Fault:
    """What happens to requests that match `pattern` ("METHOD /path"), as often as `times` says."""

    pattern: str
    action: int | str  # a status, "close", or "half": the body breaks off in the middle
    times: int = 1


class HubServer:
    """`with HubServer() as hub:` serves at `hub.url` from a thread of its own."""

    def __init__(self, lfs_chunk=None, page=2):
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.before_commit = None  # called once, before the next commit is looked at
        self.cards: list[str] = []  # what was sent to be validated
        self.lfs_chunk = lfs_chunk
        self.page = page

    # ---- in the tests ------------------------------------------------------------------------------------------

    def add(self, repo_id, files=None, **kwargs):
        repo = self.repos[repo_id] = Repo(**kwargs)
        repo.commit({".gitattributes": b"*.safetensors filter=lfs", **(files or {})}, "initial commit")
        return repo

    def add_folder(self, repo_id, folder, **kwargs):
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        return self.add(repo_id, files, **kwargs)

    def fail(self, pattern, action, times=1):
        self.faults.append(Fault(pattern, action, times))

    def asked(self, pattern):
        return [request for request in self.requests if re.search(pattern, request)]

    # ---- the server --------------------------------------------------------------------------------------------

    def __enter__(self):
        started = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.stop = asyncio.Event()

        async def serve():
            app = web.Application(client_max_size=2**30)
            app.router.add_route("*", "/{path:.*}", self.handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self.url = f"http://127.0.0.1:{self.port}"
            started.set()
            await self.stop.wait()
            await runner.cleanup()

        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(serve()), daemon=True)
        self.thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *error):
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)
        self.loop.close()

    async def handle(self, request):
        line = f"{request.method} {request.path}"
        self.requests.append(line)
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.pattern, line):
                fault.times -= 1
                if fault.action == "close":
                    await request.read()
                    request.transport.close()
                    return web.Response()
                if fault.action == "half":
                    return await self.half(request)
                await request.read()
                return web.json_response({"error": "injected"}, status=fault.action)
        return await self.logits(request)

    async def half(self, request):
        whole = await self.logits(request)
        response = web.StreamResponse(status=whole.status, headers=whole.headers)
        response.content_length = len(whole.body)
        await response.prepare(request)
        await response.write(whole.body[: len(whole.body) // 2])
        request.transport.close()
        return response

    async def logits(self, request):
        for method, pattern, function in ROUTES:
            match = re.fullmatch(pattern, request.path)
            if match and request.method in method.split():
                return await function(self, request, *match.groups())
        return web.json_response({"error": f"no route for {request.method} {request.path}"}, status=404)

    # ---- repositories ------------------------------------------------------------------------------------------

    def user(self, request):
        return TOKENS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))

    def repo(self, request, repo_id, write=False):
        """The repository, or a refusal as the Hub makes them."""
        repo, user = self.repos.get(repo_id), self.user(request)
        owner = repo_id.split("/")[0]
        if user is None and (repo is None or repo.private or write):
            raise refusal(
                web.HTTPUnauthorized, None if repo is None else "RepoNotFound", "Invalid username or password."
            )
        if repo is None or (repo.private and user != owner):
            raise refusal(web.HTTPNotFound, "RepoNotFound", "Repository not found")
        if write and user != owner:
            raise refusal(web.HTTPForbidden, None, "You don't have the rights required")
        if repo.gated and user != owner and "/resolve/" in request.path:
            raise refusal(web.HTTPForbidden, "GatedRepo", "Access to this model is restricted")
        return repo

    def files(self, repo, revision):
        sha = repo.find(revision)
        if sha is None:
            raise refusal(web.HTTPNotFound, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, repo.commits[sha]

    async def whoami(self, request):
        user = self.user(request)
        if user is None:
            raise refusal(web.HTTPUnauthorized, None, "Invalid username or password.")
        return web.json_response({"type": "user", "name": user, "orgs": [], "auth": {"type": "access_token"}})

    async def create(self, request):
        body, user = await request.json(), self.user(request)
        if user is None:
            raise refusal(web.HTTPUnauthorized, None, "Invalid username or password.")
        owner = body.get("organization") or user
        if owner != user:
            raise refusal(web.HTTPForbidden, None, "You don't have the rights required")
        repo_id = f"{owner}/{body['name']}"
        answer = {"url": f"{self.url}/{repo_id}", "name": repo_id}
        if repo_id in self.repos:
            return web.json_response({**answer, "error": "You already created this model repo"}, status=409)
        self.add(repo_id, private=bool(body.get("private")) or body.get("visibility") == "private")
        return web.json_response(answer)

    async def validate(self, request):
        content = (await request.json())["content"]
        self.cards.append(content)
        errors = card_errors(content)
        return web.json_response({"errors": errors, "warnings": []}, status=400 if errors else 200)

    async def preupload(self, request, repo_id, revision):
        repo = self.repo(request, repo_id, write=True)
        there = self.files(repo, revision)[1]
        files = []
        for entry in (await request.json())["files"]:
            path = entry["path"]
            lfs = path.endswith(LFS)
            oid = (sha256 if lfs else blob)(there[path]) if path in there else None
            mode = "lfs" if lfs else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return web.json_response({"files": files})

    async def batch(self, request, repo_id):
        self.repo(request, repo_id, write=True)
        objects = []
        for item in (await request.json())["objects"]:
            oid, size = item["oid"], item["size"]
            entry = {"oid": oid, "size": size}
            if oid not in self.lfs:
                upload = {"href": f"{self.url}/lfs/{oid}"}
                if self.lfs_chunk:
                    parts = -(-size // self.lfs_chunk)
                    header = {str(i + 1): f"{self.url}/lfs/{oid}/{i + 1}" for i in range(parts)}
                    upload = {
                        "href": f"{self.url}/lfs/{oid}/done",
                        "header": {"chunk_size": str(self.lfs_chunk), **header},
                    }
                entry["actions"] = {"upload": upload, "verify": {"href": f"{self.url}/lfs/{oid}/verify"}}
            objects.append(entry)
        return web.json_response({"transfer": "multipart" if self.lfs_chunk else "basic", "objects": objects})

    async def lfs_put(self, request, oid):
        body = await request.read()
        if sha256(body) != oid:
            return web.json_response({"error": "digest"}, status=400)
        self.lfs[oid] = body
        return web.Response()

    async def lfs_part(self, request, oid, number):
        body = await request.read()
        self.parts[oid, int(number)] = body
        return web.Response(headers={"ETag": f'"{sha256(body)}"'})

    async def lfs_done(self, request, oid):
        parts = (await request.json())["parts"]
        body = b"".join(self.parts[oid, part["partNumber"]] for part in parts)
        assert sha256(body) == oid
        self.lfs[oid] = body
        return web.json_response({})

    async def lfs_verify(self, request, oid):
        return web.json_response({}, status=200 if oid in self.lfs else 404)

    async def lfs_get(self, request, oid):
        return ranged(request, self.lfs[oid], {"ETag": f'"{oid}"'})

    async def commit(self, request, repo_id, revision):
        repo = self.repo(request, repo_id, write=True)
        lines = [json.loads(line) for line in (await request.read()).splitlines() if line.strip()]
        if self.before_commit is not None:
            function, self.before_commit = self.before_commit, None
            function()
        sha, there = self.files(repo, revision)
        header, files = {}, dict(there)
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "header":
                header = value
                if header.get("parentCommit") not in (None, sha):
                    raise refusal(
                        web.HTTPPreconditionFailed, None, "The branch was updated since you opened this page"
                    )
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.lfs[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            elif key == "deletedFolder":
                files = {path: body for path, body in files.items() if not path.startswith(value["path"])}
        new = repo.commit(files, header.get("summary", ""), unquote(revision))
        return web.json_response(
            {"success": True, "commitOid": new, "commitUrl": f"{self.url}/{repo_id}/commit/{new}"}
        )

    async def info(self, request, repo_id, revision="main"):
        repo = self.repo(request, repo_id)
        return web.json_response(self.description(repo_id, repo, *self.files(repo, revision)))

    def description(self, repo_id, repo, sha, files):
        data = card_data(files.get("README.md", b"").decode())
        base = data.get("base_model")
        tags = [data.get("library_name"), *data.get("tags", ()), data.get("pipeline_tag")]
        tags += [f"base_model:{base}", f"base_model:adapter:{base}"] if base else []
        return {
            "_id": ZERO,
            "id": repo_id,
            "modelId": repo_id,
            "author": repo_id.split("/")[0],
            "sha": sha,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "tags": [tag for tag in tags if tag],
            "cardData": data or None,
            "library_name": data.get("library_name"),
            "siblings": [{"rfilename": path} for path in sorted(files)],
        }

    async def tree(self, request, repo_id, revision):
        sha, files = self.files(self.repo(request, repo_id), revision)
        entries = []
        for path, body in sorted(files.items()):
            entry = {"type": "file", "path": path, "oid": blob(body), "size": len(body)}
            if path.endswith(LFS):
                entry["lfs"] = {"oid": sha256(body), "size": len(body), "pointerSize": 130}
            entries.append(entry)
        return web.json_response(entries, headers={"X-Repo-Commit": sha})

    async def resolve(self, request, repo_id, revision, path):
        sha, files = self.files(self.repo(request, repo_id), revision)
        headers = {"X-Repo-Commit": sha}
        path = unquote(path)
        if path not in files:
            raise refusal(web.HTTPNotFound, "EntryNotFound", "Entry not found", headers)
        body = files[path]
        if not path.endswith(LFS):
            return ranged(request, body, {**headers, "ETag": f'"{blob(body)}"'})
        oid = sha256(body)
        self.lfs[oid] = self.lfs.get(oid, body)
        # Another host, as the Hub's large files have: the client follows a redirect on the same host by itself.
        headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(body))}
        return web.Response(status=302, headers={**headers, "Location": f"http://localhost:{self.port}/lfs/{oid}"})

    async def refs(self, request, repo_id):
        repo = self.repo(request, repo_id)

        def listed(names, kind):
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": sha} for n, sha in names.items()]

        return web.json_response(
            {"branches": listed(repo.branches, "heads"), "tags": listed(repo.tags, "tags"), "converts": []}
        )

    async def branch(self, request, repo_id, name):
        repo, name = self.repo(request, repo_id, write=True), unquote(name)
        if name in repo.branches:
            return web.json_response({"error": "Reference already exists"}, status=409)
        body = await request.json() if request.can_read_body else {}
        repo.branches[name] = self.files(repo, body.get("startingPoint", "main"))[0]
        return web.json_response({})

    async def tag(self, request, repo_id, revision):
        repo = self.repo(request, repo_id, write=True)
        repo.tags[(await request.json())["tag"]] = self.files(repo, revision)[0]
        return web.json_response({})

    async def models(self, request):
        wanted, author = request.query.getall("filter", []), request.query.get("author")
        found = []
        for repo_id, repo in sorted(self.repos.items()):
            about = self.description(repo_id, repo, repo.branches["main"], repo.files)
            if not repo.private and author in (None, about["author"]) and set(wanted) <= set(about["tags"]):
                found.append(about)
        start = int(request.query.get("cursor", 0))
        headers = {}
        if start + self.page < len(found):
            query = request.url.update_query(cursor=str(start + self.page))
            headers["Link"] = f'<{query}>; rel="next"'
        return web.json_response(found[start : start + self.page], headers=headers)


R = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", HubServer.whoami),
    ("POST", "/api/repos/create", HubServer.create),
    ("POST", "/api/validate-yaml", HubServer.validate),
    ("GET", "/api/models", HubServer.models),
    ("POST", f"/api/models/{R}/preupload/(.+)", HubServer.preupload),
    ("POST", f"/api/models/{R}/commit/(.+)", HubServer.commit),
    ("GET", f"/api/models/{R}/revision/(.+)", HubServer.info),
    ("GET", f"/api/models/{R}/tree/(.+)", HubServer.tree),
    ("GET", f"/api/models/{R}/refs", HubServer.refs),
    ("POST", f"/api/models/{R}/branch/(.+)", HubServer.branch),
    ("POST", f"/api/models/{R}/tag/(.+)", HubServer.tag),
    ("GET", f"/api/models/{R}", HubServer.info),
    ("POST", rf"/{R}\.git/info/lfs/objects/batch", HubServer.batch),
    ("PUT", "/lfs/([0-9a-f]{64})", HubServer.lfs_put),
    ("PUT", r"/lfs/([0-9a-f]{64})/(\d+)", HubServer.lfs_part),
    ("POST", "/lfs/([0-9a-f]{64})/done", HubServer.lfs_done),
    ("POST", "/lfs/([0-9a-f]{64})/verify", HubServer.lfs_verify),
    ("GET HEAD", "/lfs/([0-9a-f]{64})", HubServer.lfs_get),
    ("GET HEAD", f"/{R}/resolve/([^/]+)/(.+)", HubServer.resolve),
]


def sha256(body):
    return hashlib.sha256(body).hexdigest()


def blob(body):
    """git's name for a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def refusal(kind, code, message, headers=None):
    headers = {**(headers or {}), "X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    return kind(text=json.dumps({"error": message}), content_type="application/json", headers=headers)


def ranged(request, body, headers):
    """A body or the part of it that was asked for."""
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if match:
        start, stop = int(match[1]), int(match[2]) + 1 if match[2] else len(body)
        headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(body)}"}
        return web.Response(status=206, body=body[start:stop], headers=headers)
    return web.Response(body=body, headers=headers)


def card_data(text):
    match = re.match(r"---\n(.*?)\n---", text, re.S)
    return (yaml.safe_load(match[1]) or {}) if match else {}


def card_errors(text):
    """What the Hub would say against a card's metadata; only what can be checked without its lists of names."""
    match = re.match(r"---\n(.*?)\n---\n", text, re.S)
    if match is None:
        return [{"message": "no metadata"}]
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return [{"message": str(error)}]
    errors = []
    for key in ("base_model", "license", "library_name", "pipeline_tag"):
        if key in data and not isinstance(data[key], str):
            errors.append(f"{key} must be a string")
    for key in ("tags", "datasets"):
        if not all(isinstance(value, str) and value for value in data.get(key) or ()):
            errors.append(f"{key} must be strings")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(data.get("base_model", "x"))):
        errors.append("base_model is no model id")
    if "model-index" in data:
        try:
            name, results = model_index_to_eval_results(data["model-index"])
            ModelCardData(model_name=name, eval_results=results)
            if not all(isinstance(result.metric_value, (int, float)) for result in results):
                errors.append("a metric is no number")
        except (KeyError, TypeError, ValueError) as error:
            errors.append(f"model-index: {error!r}")
    return [{"message": error} for error in errors]
