"""Each fault of the loopback Hub, as the real client meets it."""

from __future__ import annotations

import hashlib
import socket
import time
import uuid

import pytest

from loopback_client import Failed, hub_with_client, left_as_found, refused
from loopback_hub import LoopbackHub

COMMIT = "api.create_commit(repo, {}, commit_message='m').oid"
SMALL = COMMIT.format("[Add('a.txt', b'a')]")
LARGE = COMMIT.format("[Add('m.safetensors', content.encode())]")
HEAD = "api.repo_info(repo).sha"
CONTENT = "0123456789" * 1000
SHA256 = hashlib.sha256(CONTENT.encode()).hexdigest()
LOST = {"RemoteProtocolError", "ReadError", "WriteError"}
"""How a connection that ends looks to the client, depending on how far it was."""


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


def statuses(hub: LoopbackHub, endpoint: str, since: int) -> list[int | str]:
    """How requests to an endpoint went since the log was so long."""
    return [one.status for one in hub.requests[since:] if one.endpoint == endpoint]


def test_faults_hit_the_requests_they_are_scripted_for(hub, client, repo):
    since = len(hub.requests)
    fault = hub.fault("info", "status", status=503, after=1, times=2)
    for expected in (None, 503, 503, None):
        client("api.whoami()")  # is not counted
        if expected is None:
            assert client(HEAD, repo=repo) == hub.repo(repo).head
        else:
            assert refused(client, HEAD, repo=repo).status == expected
    assert statuses(hub, "info", since) == [200, 503, 503, 200]
    assert fault.hits == 2
    hub.fault("*", "status", status=404, times=None)
    for call in (HEAD, "api.whoami()", "api.list_repo_refs(repo)"):
        assert refused(client, call, repo=repo).status == 404
    hub.clear_faults()
    client(HEAD, repo=repo)


@pytest.mark.parametrize(
    "wrong",
    [
        ("info", "ignore-parent", {}),
        ("nowhere", "refuse", {}),
        ("info", "explode", {}),
        ("info", "status", {}),
        ("info", "refuse", {"status": 500}),
    ],
)
def test_a_fault_that_cannot_be_is_a_mistake_of_the_test(hub, wrong):
    endpoint, kind, details = wrong
    with pytest.raises(ValueError, match=r"status|hits|none of"):
        hub.fault(endpoint, kind, **details)


@pytest.mark.parametrize("status", [500, 503, 409, 412, 401, 429, 403])
def test_a_status_before_the_commit_leaves_nothing_behind(hub, client, repo, status):
    head = hub.repo(repo).head
    headers = {"Retry-After": "7", "RateLimit": '"api";r=0;t=55'}
    hub.fault("commit", "status", status=status, message="Storage is full", headers=headers)
    error = refused(client, SMALL, repo=repo)
    assert error.status == status
    assert "Storage is full" in str(error)
    assert ("Retry after 55 seconds" in str(error)) == (status == 429)
    assert hub.repo(repo).head == head
    assert client(SMALL, repo=repo) == hub.repo(repo).head != head


def test_errors_are_typed_by_their_code(hub, client, repo):
    hub.fault("info", "status", status=404, code="RepoNotFound")
    assert "RepositoryNotFoundError" in refused(client, HEAD, repo=repo).kinds


def test_a_limited_client_waits_as_long_as_it_is_told(hub, client, repo):
    since = len(hub.requests)
    hub.fault("preupload", "status", status=429, headers={"RateLimit": '"api";r=0;t=0'})
    client(SMALL, repo=repo)  # and one second more
    assert statuses(hub, "preupload", since) == [429, 200]


def test_a_failing_upload_is_sent_again(hub, client, repo):
    since = len(hub.requests)
    hub.multipart_above, hub.part_bytes = 1, len(CONTENT) // 2
    hub.fault("part", "status", status=500, after=1)
    oid = client(LARGE, repo=repo, content=CONTENT)
    assert statuses(hub, "part", since) == [200, 500, 200]
    assert hub.repo(repo).read(oid, "m.safetensors") == CONTENT.encode()
    assert hub.uploaded[SHA256] == 1


def test_an_upload_that_is_reset_leaves_nothing_behind(hub, client, repo):
    since, before = len(hub.requests), hub.uploaded[SHA256]
    hub.fault("put", "reset")
    client.begin(LARGE, repo=repo, content=CONTENT)
    hub.wait_for(lambda: statuses(hub, "put", since))
    assert statuses(hub, "put", since) == ["reset"]
    assert hub.repo(repo).contents.size_of_large(SHA256) is None
    assert client.end() == hub.repo(repo).head
    assert statuses(hub, "put", since) == ["reset", 200]
    assert hub.uploaded[SHA256] == before + 1


def test_a_refused_connection_without_retries_is_an_error(hub, client, repo):
    for endpoint, call in {
        "info": HEAD,
        "commit": SMALL,
        "refs": "api.list_repo_refs(repo)",
    }.items():
        hub.fault(endpoint, "refuse")
        assert LOST & set(refused(client, call, repo=repo).kinds)
    assert len(hub.repo(repo).commits) == 1


def test_the_commit_stands_although_its_answer_is_lost(hub, client, repo):
    hub.fault("commit", "lost-answer")
    assert LOST & set(refused(client, SMALL, repo=repo).kinds)
    hub.fault("commit", "lost-answer", status=500)
    other = COMMIT.format("[Add('b.txt', b'b')]")
    assert refused(client, other, repo=repo).status == 500
    assert sorted(hub.repo(repo).files("main")) == [".gitattributes", "a.txt", "b.txt"]


@pytest.mark.parametrize("lost", ["complete", "verify"])
def test_a_large_content_with_a_lost_answer_is_stored_once(hub, client, repo, lost):
    before = hub.uploaded[SHA256]
    hub.multipart_above = 1
    hub.fault(lost, "lost-answer")
    client(LARGE, repo=repo, content=CONTENT)
    assert hub.uploaded[SHA256] == before + 1


def test_a_truncated_download_is_resumed_after_ten_megabytes(hub, client, repo, tmp_path):
    small, large = CONTENT.encode(), CONTENT.encode() * 2400
    hub.commit_files(repo, {"m.safetensors": large, "a.txt": small})
    expected = {"m.safetensors": ("blob-get", large, 206), "a.txt": ("resolve-get", small, 200)}
    get = "api.hf_hub_download(repo, name, local_dir=folder)"
    for name, (endpoint, content, status) in expected.items():
        since = len(hub.requests)
        hub.fault(endpoint, "truncated")
        client(get, repo=repo, folder=str(tmp_path), name=name)
        assert statuses(hub, endpoint, since) == ["truncated", status]
        assert (tmp_path / name).read_bytes() == content


def test_a_reset_download_is_an_error(hub, client, repo, tmp_path):
    hub.commit_files(repo, {"m.safetensors": CONTENT.encode() * 500})
    hub.fault("blob-get", "reset")
    get = "api.hf_hub_download(repo, 'm.safetensors', local_dir=folder)"
    assert "ReadError" in refused(client, get, repo=repo, folder=str(tmp_path)).kinds


def test_a_corrupted_download_has_the_right_size(hub, client, repo, tmp_path):
    hub.commit_files(repo, {"m.safetensors": CONTENT.encode()})
    hub.fault("blob-get", "corrupted")
    get = "list(Path(api.hf_hub_download(repo, 'm.safetensors', local_dir=folder)).read_bytes())"
    found = client(get, repo=repo, folder=str(tmp_path))
    assert len(found) == len(CONTENT)
    wrong = [at for at, byte in enumerate(CONTENT.encode()) if found[at] != byte]
    assert wrong == list(range(len(CONTENT) // 2, len(CONTENT) // 2 + 4))


def test_a_stale_head_shows_in_all_reads_of_main(hub, client, repo, tmp_path):
    old = hub.commit_files(repo, {"a.txt": b"old"})
    new = hub.commit_files(repo, {"a.txt": b"newer"})
    reads = {
        "info": (HEAD, old, new),
        "tree": ("[f.size for f in api.list_repo_tree(repo)][1]", 3, 5),
        "paths-info": ("api.get_paths_info(repo, 'a.txt')[0].size", 3, 5),
        "commits": ("api.list_repo_commits(repo)[0].commit_id", old, new),
        "resolve-head": ("api.file_exists(repo, 'a.txt')", True, True),
    }
    for endpoint, (call, stale, fresh) in reads.items():
        hub.fault(endpoint, "stale-head")
        assert [client(call, repo=repo), client(call, repo=repo)] == [stale, fresh]
    hub.fault("*", "stale-head", times=None)
    get = "Path(api.hf_hub_download(repo, 'a.txt', revision=at, local_dir=folder)).read_text()"
    names = {"repo": repo, "folder": str(tmp_path)}
    assert [client(get, **names, at=at) for at in ("main", new)] == ["old", "newer"]


def test_parents_may_be_ignored_or_answered_badly(hub, client, repo):
    stale = hub.repo(repo).head
    other = hub.commit_files(repo, {"b.txt": b"b"})
    commit = SMALL.replace("'m'", "'m', parent_commit=parent")
    hub.fault("commit", "parent-500")
    assert refused(client, commit, repo=repo, parent=stale).status == 500
    assert hub.repo(repo).head == other
    assert refused(client, commit, repo=repo, parent=stale).status == 412
    hub.fault("commit", "ignore-parent")
    hub.fault("commit", "lost-answer", status=500)  # as the Hub did in 2025
    assert refused(client, commit, repo=repo, parent=stale).status == 500
    assert sorted(hub.repo(repo).files("main")) == [".gitattributes", "a.txt", "b.txt"]


def test_a_hub_that_is_down_comes_back_at_the_same_address(hub, client, repo):
    client(HEAD, repo=repo)  # leaves a connection open
    hub.down()
    hub.down()
    assert "ConnectError" in refused(client, HEAD, repo=repo).kinds
    hub.up()
    assert client(SMALL, repo=repo) == hub.repo(repo).head


def test_what_hangs_does_not_keep_the_hub_from_going_down(hub, client, repo):
    for endpoint, call in {"info": HEAD, "commit": SMALL}.items():
        since = len(hub.requests)
        hub.fault(endpoint, "hang")
        client.begin(call, repo=repo)
        hub.wait_for(lambda endpoint=endpoint, since=since: statuses(hub, endpoint, since))
        begun = time.monotonic()
        hub.down()
        assert time.monotonic() - begun < 1
        with pytest.raises(Failed, match=r"RemoteProtocolError|ReadError"):
            client.end()
        hub.up()
    assert len(hub.repo(repo).commits) == 1


def test_a_client_that_leaves_within_a_request_did_nothing(hub, client, repo):
    address = ("127.0.0.1", int(hub.endpoint.rpartition(":")[2]))
    since = len(hub.requests)
    with socket.create_connection(address) as connection:
        head = [
            f"POST /api/models/{repo}/commit/main HTTP/1.1",
            f"Authorization: Bearer {hub.default_token}",
            "Content-Length: 100",
        ]
        connection.sendall("\r\n".join([*head, "", '{"key":']).encode())
    hub.wait_for(lambda: len(hub.requests) > since)
    assert statuses(hub, "commit", since) == ["client-left"]
    assert len(hub.repo(repo).commits) == 1


def test_latency_is_added_to_every_request(hub, client, repo):
    hub.latency = (0.05, 0.06)
    begun = time.monotonic()
    client("api.whoami()")
    assert time.monotonic() - begun >= 0.05


def test_waiting_ends_at_its_deadline(hub):
    assert hub.wait_for(lambda: "at once") == "at once"
    with pytest.raises(AssertionError, match=r"not within 0\.01 seconds"):
        hub.wait_for(lambda: False, 0.01)
