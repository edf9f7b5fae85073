"""Errors of a store, in a few kinds, and which of them an error of a client is.

Every message is a sentence without tokens and without control characters.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    BucketNotFoundError,
    GatedRepoError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from common.failures import Failure, failure_of

REMEDY = "Log in with `hf auth login`, or set HF_TOKEN, with a token that may write."
WRITING_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Of a disk that is written to. They name the file that is read, the other one, or none."""
XET_DISK_ERROR = re.compile(r"\(os error (\d+)\)")
"""In the errors of hf_xet, of built-in types, about a disk."""
LIST_IT = "To list what exists: `python -m snapshot list {name}`."


class StoreError(Failure):
    """A request to a store failed."""

    @property
    def reason(self) -> str:
        """The first sentence, without a remedy: why something optional could not be done."""
        return str(self).partition(". ")[0].rstrip(".")


class StoreUnreachable(StoreError):
    """A failure that may pass."""

    may_pass = True


class StoreOffline(StoreUnreachable):
    """This process must not use the Hub."""

    may_pass = False


class StoreRefused(StoreError):
    """A lasting failure, until somebody changes a token, a permission or a name."""


class StoreMissing(StoreRefused):
    """The store does not exist, or the token may not see it."""


class NoRevision(StoreRefused):
    """The repo exists, but not the commit, branch or tag."""


class NoFile(StoreRefused):
    """A file that was listed is not there: its snapshot was pruned, or its content lost."""


class StoreMoved(StoreError):
    """Another upload came first."""


MISSING = "there is no repo {name}, or the token may not see it ({short}). Check the name. "
KINDS: dict[type[BaseException] | int, tuple[type[StoreError], str]] = {
    LocalTokenNotFoundError: (StoreRefused, f"{{key}} needs a token, and there is none. {REMEDY}"),
    OfflineModeIsEnabled: (StoreOffline, "HF_HUB_OFFLINE is set, so the Hub is not used"),
    GatedRepoError: (
        StoreMissing,
        "{name} is gated ({short}): request access on its page of the Hub, then log in with "
        "`hf auth login`, or set HF_TOKEN, with a token of that account.",
    ),
    **dict.fromkeys(
        (RepositoryNotFoundError, BucketNotFoundError), (StoreMissing, MISSING + REMEDY)
    ),
    RevisionNotFoundError: (
        NoRevision,
        "{name} has no such revision: no branch, tag or commit has that name, or a squash has "
        f"removed the commit. {LIST_IT}",
    ),
    FileNotFoundError: (NoFile, "{name} lacks a file or a folder ({reason}). Check {key}."),
    401: (StoreRefused, f"the Hub does not accept the token ({{reason}}). {REMEDY}"),
    404: (
        NoFile,
        "{name} lists a file that is gone ({short}): that snapshot was pruned, or its content is "
        f"lost. {LIST_IT}",
    ),
    412: (StoreMoved, "{name} has moved on ({short})"),
    BaseException: (
        StoreRefused,
        "{server} refuses ({reason}). Check {key}, the token or the credentials, their "
        "permissions, and the free storage.",
    ),
}
"""Kind and sentence, by the type of an error or the status of an answer; the first that fits."""


def disk_error(error: Exception, downloads: bool, store_folder: Path | None) -> OSError | None:
    """The error of this machine's disk that a client met, if it is one.

    A store on a disk, in `store_folder`, has errors of the same kinds. Its own are those that name
    its files, and when it is written to, those of a full disk. The Hub client reads its token from
    a file, whose errors have the remedies of a request.
    """
    if match := XET_DISK_ERROR.search(str(error)):
        return OSError(int(match[1]), os.strerror(int(match[1])))
    if not isinstance(error, OSError):
        return None
    if error.errno in WRITING_ERRORS:
        return error if downloads or store_folder is None else None
    if error.errno == errno.EIO and store_folder is None:  # a network has no such error
        return error
    named = [Path(str(one)) for one in (error.filename, error.filename2) if one is not None]
    if error.errno is None or not named:  # as that of a server
        return None
    if Path(constants.HF_TOKEN_PATH) in named:
        return None
    if store_folder is None:  # a server's may name its own files: smb://..., \\\\host\\share
        return error if all(one.is_absolute() for one in named) else None
    return None if any(one.is_relative_to(store_folder) for one in named) else error


def translate(error: BaseException, name: str, key: str, server: str) -> StoreError:
    """The StoreError of the right kind for any error of a client.

    `name` is the store's, `key` what named it, and `server` who answers for it.
    """
    failure = failure_of(error)
    if isinstance(failure, StoreError):
        return failure
    kind: type[StoreError] = StoreUnreachable
    sentence = "{server} cannot be reached ({reason})"
    if not failure.may_pass:
        kind, sentence = next(
            row
            for of, row in KINDS.items()
            if of == failure.status or (isinstance(of, type) and isinstance(failure.cause, of))
        )
    reason = str(failure)
    if kind is StoreRefused and failure.status is None:  # the name of its type says more
        reason = f"{failure.short}: {failure}"
    message = sentence.format(name=name, key=key, server=server, short=failure.short, reason=reason)
    return kind(message, failure.short, failure.retry_after)
