"""The loopback Hub does to the real client what the Hub does: repos, files, commits, tokens."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import tracemalloc
import urllib.request
import uuid

import pytest

import loopback_hub
from loopback_client import hub_with_client, left_as_found, refused
from loopback_hub import LoopbackHub

COMMIT = "api.create_commit(repo, {}, commit_message='Title\\n\\nMore').oid"
BIG = "[Add('m.safetensors', b'big' * 1000)]"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with hub_with_client(tmp_path_factory.mktemp("hub")) as both:
        yield both


@pytest.fixture
def hub(shared):
    with left_as_found(shared[0]) as hub:
        yield hub


@pytest.fixture
def client(shared):
    return shared[1]


@pytest.fixture
def repo(hub):
    return hub.create(f"me/run-{uuid.uuid4().hex}").id


def endpoints(hub: LoopbackHub, since: int) -> list[tuple[str, int | str]]:
    """What was asked since the log was so long."""
    return [(one.endpoint, one.status) for one in hub.requests[since:]]


def test_the_client_knows_who_it_is(hub, client):
    who = client("api.whoami()")
    assert (who["name"], who["auth"]["accessToken"]["role"]) == ("me", "write")


def test_a_repo_is_made_described_and_deleted(hub, client):
    assert client("str(api.create_repo('me/made', private=True))") == f"{hub.endpoint}/me/made"
    assert hub.repo("me/made").private
    assert refused(client, "api.create_repo('me/made')").status == 409
    assert client("api.create_repo('me/made', private=False, exist_ok=True).repo_id") == "me/made"
    info = "[(i.id, i.sha, i.private, [s.rfilename for s in i.siblings]) for i in [{}]][0]"
    for call in ("api.repo_info('me/made')", "api.repo_info('me/made', revision='main')"):
        assert client(info.format(call)) == [
            "me/made",
            hub.repo("me/made").head,
            True,
            [".gitattributes"],
        ]
    client("api.create_repo('me/public', private=False)")
    assert not hub.repo("me/public").private
    client("api.delete_repo('me/made')")
    assert hub.repo("me/made") is None
    assert "RepositoryNotFoundError" in refused(client, "api.delete_repo('me/made')").kinds


def test_small_files_lie_in_git_and_large_ones_are_uploaded_once(hub, client, repo):
    since = len(hub.requests)
    files = "[Add('README.md', b'# Hi'), Add('a/b c.json', b'{}'), Add('m.safetensors', b'big')]"
    oid = client(COMMIT.format(files), repo=repo)
    assert [name for name, status in endpoints(hub, since) if status == 200] == [
        *("validate-yaml", "preupload", "batch", "put", "verify", "commit")
    ]
    found = hub.repo(repo)
    assert found.commits[-1] == found.head == oid
    assert found.commit(oid).title == "Title\n\nMore"
    assert found.read(oid, "a/b c.json") == b"{}"
    assert found.read("main", "m.safetensors") == b"big"
    entries = found.files(oid)
    assert [entries[path].is_lfs for path in ("README.md", "m.safetensors")] == [False, True]
    assert found.referenced_bytes(oid) == sum(entry.size for entry in entries.values())

    again = "[Add('copy.safetensors', b'big'), Add('a/b c.json', b'{}')]"
    oid = client(COMMIT.format(again), repo=repo)
    assert hub.uploaded[hashlib.sha256(b"big").hexdigest()] == 1
    assert found.referenced_bytes(oid) == sum(entry.size for entry in entries.values())
    assert client(COMMIT.format("[Add('copy.safetensors', b'big')]"), repo=repo) == oid
    assert len(found.commits) == 3  # what had not changed made no commit


def test_large_files_go_in_parts_where_the_hub_says_so(hub, client, repo, tmp_path):
    hub.multipart_above, hub.part_bytes, hub.lfs_above = 1000, 400, 500
    content = bytes(range(256)) * 4
    (tmp_path / "file").write_bytes(content)
    since = len(hub.requests)
    oid = client(COMMIT.format("[Add('big.bin', path)]"), repo=repo, path=str(tmp_path / "file"))
    names = [name for name, _ in endpoints(hub, since)]
    assert names == ["preupload", "batch", *["part"] * 3, "complete", "verify", "commit"]
    assert hub.repo(repo).read(oid, "big.bin") == content
    assert hub.uploaded[hashlib.sha256(content).hexdigest()] == 1


def test_files_and_folders_are_deleted_all_or_none(hub, client, repo):
    hub.commit_files(repo, {"a.txt": b"a", "old/b.txt": b"b", "old/c/d.txt": b"d"})
    client(COMMIT.format("[Delete('a.txt'), Delete('old/c/'), Add('e.txt', b'e')]"), repo=repo)
    assert sorted(hub.repo(repo).files("main")) == [".gitattributes", "e.txt", "old/b.txt"]
    head = hub.repo(repo).head
    error = refused(client, COMMIT.format("[Delete('e.txt'), Delete('a.txt')]"), repo=repo)
    assert error.status == 400
    assert hub.repo(repo).head == head


def test_listings_come_in_pages(hub, client, repo):
    names = [f"s/{number}/f.json" for number in range(5)]
    hub.commit_files(repo, {**dict.fromkeys(names, b"{}"), "m.safetensors": b"big"})
    hub.page_size = 2
    tree = "[f.path for f in api.list_repo_tree(repo, {})]"
    files = [".gitattributes", "m.safetensors", *names]
    folders = ["s", *(f"s/{number}" for number in range(5))]
    before = hub.count("tree")
    assert client(tree.format("recursive=True"), repo=repo) == sorted(files + folders)
    assert hub.count("tree") == before + 7  # 13 entries
    assert client(tree.format(""), repo=repo) == [".gitattributes", "m.safetensors", "s"]
    assert client(tree.format("'s', expand=True"), repo=repo) == folders[1:]
    assert "EntryNotFoundError" in refused(client, tree.format("'x'"), repo=repo).kinds
    found = client(
        "[(f.path, f.lfs.sha256 if hasattr(f, 'lfs') and f.lfs else None, f.last_commit.title)"
        " for f in api.get_paths_info(repo, ['m.safetensors', 's', 'none'], expand=True)]",
        repo=repo,
    )
    title = "Commit by somebody else"
    assert found == [
        ["m.safetensors", hashlib.sha256(b"big").hexdigest(), title],
        ["s", None, title],
    ]


def test_downloads_come_without_the_token_from_the_other_origin(hub, client, repo, tmp_path):
    first = hub.commit_files(repo, {"a/é.json": b"{}", "m.safetensors": b"big"})
    hub.commit_files(repo, {"a/é.json": b"[]"})
    get = "Path(api.hf_hub_download(repo, {}, local_dir=folder)).read_text()"
    names = {"repo": repo, "folder": str(tmp_path)}
    assert client(get.format("'a/é.json'"), **names) == "[]"
    assert client(get.format("'a/é.json', revision=first"), **names, first=first) == "{}"
    assert client(get.format("'m.safetensors'"), **names) == "big"
    last = hub.requests[-1]
    assert (last.endpoint, last.token, last.status) == ("blob-get", None, 200)
    assert hub.requests[-2].token == hub.default_token
    whole = client(
        "sorted(p.name for p in Path(api.snapshot_download(repo)).rglob('*.*'))", repo=repo
    )
    assert whole == [".gitattributes", "m.safetensors", "é.json"]
    assert "EntryNotFoundError" in refused(client, get.format("'none'"), **names).kinds
    missing = get.format("'m.safetensors', revision='none'")
    assert "RevisionNotFoundError" in refused(client, missing, **names).kinds


def test_ranges_are_answered(hub, client, repo):
    hub.commit_files(repo, {"a.txt": b"0123456789", "m.safetensors": b"0123456789"})
    get = (
        "[(r.status_code, r.text) for r in [http.get(f'{api.endpoint}/{repo}/resolve/main/{path}',"
        " headers={**token, 'Range': f'bytes={range}'})]][0]"
    )
    for path in ("a.txt", "m.safetensors"):
        for asked, answer in {"7-": "789", "2-3": "23", "-1": "9", "8-20": "89"}.items():
            assert client(get, repo=repo, path=path, range=asked) == [206, answer]
        assert client(get, repo=repo, path=path, range="10-") == [416, ""]


def test_branches_and_tags(hub, client, repo):
    first = hub.repo(repo).head
    client("api.create_branch(repo, branch='try/one')", repo=repo)
    oid = client(
        "api.create_commit(repo, [Add('a', b'a')], commit_message='m', revision='try/one').oid",
        repo=repo,
    )
    client("api.create_tag(repo, tag='v1', revision='try/one', tag_message='m')", repo=repo)
    assert hub.repo(repo).branches == {"main": first, "try/one": oid}
    assert client("api.repo_info(repo, revision='v1').sha", repo=repo) == oid
    refs = "[[(r.name, r.ref, r.target_commit) for r in kind] for kind in [{0}.branches, {0}.tags]]"
    assert client(refs.format("api.list_repo_refs(repo)"), repo=repo) == [
        [["main", "refs/heads/main", first], ["try/one", "refs/heads/try/one", oid]],
        [["v1", "refs/tags/v1", oid]],
    ]
    assert refused(client, "api.create_branch(repo, branch='try/one')", repo=repo).status == 409
    assert refused(client, "api.create_tag(repo, tag='v1')", repo=repo).status == 409
    client("api.delete_branch(repo, branch='try/one')", repo=repo)
    assert client("api.repo_info(repo, revision=oid).sha", repo=repo, oid=oid) == oid  # by the tag
    client("api.delete_tag(repo, tag='v1')", repo=repo)
    gone = refused(client, "api.repo_info(repo, revision=oid)", repo=repo, oid=oid)
    assert "RevisionNotFoundError" in gone.kinds


def test_a_stale_parent_is_refused_and_of_two_commits_one_wins(hub, client, repo):
    first = hub.repo(repo).head
    commit = (
        "api.create_commit(repo, [Add(name, b'x')], commit_message='m', parent_commit=parent).oid"
    )
    second = client(commit, repo=repo, name="a", parent=first)
    assert refused(client, commit, repo=repo, name="b", parent=first).status == 412
    race = (
        "sorted(str(f.exception())[:3] for f in (lambda pool: [pool.submit(api.create_commit, repo,"
        " [Add(str(n), b'x')], commit_message='m', parent_commit=parent) for n in range(4)])"
        "(ThreadPoolExecutor(4)))"
    )
    outcomes = client(race, repo=repo, parent=second)
    assert len([one for one in outcomes if one == "Non"]) == 1, outcomes
    assert len(hub.repo(repo).commits) == 3


def test_what_is_not_whole_is_not_committed(hub, client, repo):
    head = hub.repo(repo).head
    post = (
        "http.post(f'{api.endpoint}/api/models/{repo}/commit/main', headers=token,"
        " content='\\n'.join(lines)).status_code"
    )
    header = '{"key": "header", "value": {"summary": "m"}}'
    good = '{"key": "file", "value": {"path": "a", "content": "YQ==", "encoding": "base64"}}'
    for bad in (
        good.replace('"a"', '"../a"'),
        good.replace("YQ==", "Y"),
        good.replace("base64", "utf-8"),
        good.replace('"a"', '"a.safetensors"'),
        good.replace("file", "file2"),
        good[:-2],
        '{"key": "lfsFile", "value": {"path": "a", "algo": "sha256", "oid": "none", "size": 1}}',
    ):
        assert client(post, repo=repo, lines=[header, good, bad]) == 400, bad
    assert client(post, repo=repo, lines=[good]) == 400
    assert hub.repo(repo).head == head


def test_uploads_are_checked(hub, client, repo):
    oid = hashlib.sha256(b"right").hexdigest()
    batch = (
        "http.post(f'{api.endpoint}/{repo}.git/info/lfs/objects/batch', headers=token, json={"
        "'operation': 'upload', 'transfers': ['basic'], 'objects': [{'oid': oid, 'size': 5}]})"
        ".json()['objects'][0]"
    )
    actions = client(batch, repo=repo, oid=oid)["actions"]
    put = "http.put(url, content=content.encode(), headers={}).status_code"
    place = {"url": actions["upload"]["href"]}
    assert client(put.format("{}"), **place, content="wrong") == 400
    assert client(put.format("token"), **place, content="right") == 400
    assert client(put.format("{}"), url=place["url"][:-1], content="right") == 403
    assert "actions" in client(batch, repo=repo, oid=oid)
    assert hub.uploaded[oid] == 0
    assert client(put.format("{}"), **place, content="right") == 200
    assert client(batch, repo=repo, oid=oid) == {"oid": oid, "size": 5}
    verify = "http.post(url, headers=token, json={'oid': oid, 'size': size}).status_code"
    place = {"url": actions["verify"]["href"], "oid": oid}
    assert [client(verify, **place, size=size) for size in (5, 6)] == [200, 400]


def test_an_expired_token_differs_from_a_hidden_repo(hub, client, repo):
    hub.create("she/private")
    hub.create("she/public", private=False)
    token = hub.default_token
    hub.revoke(token)
    error = refused(client, "api.repo_info('she/public')")
    assert error.status == 401
    assert "RepositoryNotFoundError" not in error.kinds
    assert "Invalid credentials in Authorization header" in str(error)
    assert "Invalid user token" in str(refused(client, "api.whoami()"))
    hub.restore(token)
    assert client("api.repo_info(repo).id", repo=repo) == repo

    hidden = refused(client, "api.repo_info('she/private')")
    assert (hidden.kinds[0], hidden.status) == ("RepositoryNotFoundError", 404)
    without = refused(client, "api.repo_info('she/private', token=False)")
    assert (without.kinds[0], without.status) == ("RepositoryNotFoundError", 401)
    assert client("api.repo_info('she/public', token=False).id") == "she/public"
    assert refused(client, "api.create_repo('she/other')").status == 403
    assert refused(client, COMMIT.format(BIG), repo="she/public").status == 403
    assert refused(client, COMMIT.format(BIG), repo="me/none").status == 404


def test_a_token_that_may_only_read(hub, client, repo):
    reader = hub.add_token("hf_reader", role="read")
    scoped = hub.add_token("hf_scoped", role="fineGrained")
    role = "api.whoami(token=t)['auth']['accessToken']['role']"
    assert [client(role, t=token) for token in (reader, scoped)] == ["read", "fineGrained"]
    assert client("api.repo_info(repo, token=t).id", repo=repo, t=reader) == repo
    commit = "api.create_commit(repo, [Add('a', b'a')], commit_message='m', token=t).oid"
    assert refused(client, commit, repo=repo, t=reader).status == 403
    assert client(commit, repo=repo, t=scoped) == hub.repo(repo).head


def test_large_contents_are_not_held_in_memory(hub, client, repo, tmp_path):
    size = 48 << 20
    with (tmp_path / "file").open("wb") as file:
        file.truncate(size)
    tracemalloc.start()
    try:
        client(COMMIT.format("[Add('m.safetensors', p)]"), repo=repo, p=str(tmp_path / "file"))
        get = "Path(api.hf_hub_download(repo, 'm.safetensors', local_dir=folder)).stat().st_size"
        assert client(get, repo=repo, folder=str(tmp_path)) == size
        assert tracemalloc.get_traced_memory()[1] < size // 4
    finally:
        tracemalloc.stop()


def test_it_runs_in_the_foreground(tmp_path):
    words = [sys.executable, loopback_hub.__file__, str(tmp_path), "--latency", "0", "0.01"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        lines = dict(process.stdout.readline().strip().split("=") for _ in range(2))
        request = urllib.request.Request(
            f"{lines['HF_ENDPOINT']}/api/whoami-v2",
            headers={"Authorization": f"Bearer {lines['HF_TOKEN']}"},
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
