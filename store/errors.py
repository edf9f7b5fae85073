"""Errors of a store, in a few kinds, and which of them an error of the Hub client is.

Every message is a sentence without tokens and without control characters.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub.errors import (
    BucketNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from common.failures import Failure, Refused, failure_of, redact_secrets

REMEDY = "Log in with `hf auth login`, or set HF_TOKEN, with a token that may write."
LIST_IT = "To list what exists: `python -m snapshot list {name}`."
DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
)
"""Errors of the local disk, not of the Hub."""
XET_DISK_ERROR = re.compile(r"\(os error (\d+)\)")


class StoreError(Failure):
    """A request to a store failed."""

    sentence = ""
    """What it says of an error of the Hub client, with the names of `translate`."""

    @property
    def reason(self) -> str:
        """The first sentence, without a remedy: why something optional could not be done."""
        return str(self).partition(". ")[0].rstrip(".")


class StoreUnreachable(StoreError):
    """A failure that may pass."""

    may_pass = True
    sentence = "{server} cannot be reached ({reason})"


class StoreOffline(StoreUnreachable):
    """This process must not use the Hub."""

    may_pass = False
    sentence = "HF_HUB_OFFLINE is set, so the Hub is not used"


class StoreRefused(StoreError):
    """A lasting failure, until somebody changes a token, a permission or a name."""

    sentence = (
        "{server} refuses ({reason}). Check the token's permissions on {name}, and the free "
        "storage."
    )


class StoreMissing(StoreRefused):
    """The repo does not exist, or the token may not see it."""

    sentence = (
        "there is no repo {name}, or the token may not see it ({short}). Check the name. " + REMEDY
    )


class NoRevision(StoreRefused):
    """The repo exists, but not the commit or branch."""

    sentence = (
        "{name} has no revision {revision}: no branch, tag or commit has that name, or a squash "
        f"has removed the commit. {LIST_IT}"
    )


class NoFile(StoreRefused):
    """A file that a revision lists is not there: its snapshot was pruned, or its content lost."""

    sentence = (
        "{name} lists a file at {at} that is gone ({short}): that snapshot was pruned, or its "
        f"content is lost. {LIST_IT}"
    )


class Unsupported(StoreRefused):
    """The server does not do what the Hub does: it is an older one, or another implementation."""

    sentence = (
        "the server does not do what the Hub does ({detail}). Check hub.repo_id and "
        "HF_ENDPOINT. What is needed of a server: docs/hub.md."
    )


class StoreMoved(StoreError):
    """Another commit came first."""

    sentence = "{name} has moved on ({short})"


CAUSES: dict[type[Exception], tuple[type[StoreError], str]] = {
    Refused: (StoreRefused, "{reason}"),
    LocalTokenNotFoundError: (
        StoreRefused,
        f"hub.repo_id={{name}} needs a token, and there is none. {REMEDY}",
    ),
    HFValidationError: (StoreRefused, "{name} is not a name that the Hub allows: {reason}."),
    OfflineModeIsEnabled: (StoreOffline, StoreOffline.sentence),
    GatedRepoError: (
        StoreMissing,
        "{name} is gated ({short}): request access on its page of the Hub, then log in with "
        "`hf auth login`, or set HF_TOKEN, with a token of that account.",
    ),
    RepositoryNotFoundError: (StoreMissing, StoreMissing.sentence),
    BucketNotFoundError: (StoreMissing, StoreMissing.sentence),
    RevisionNotFoundError: (NoRevision, NoRevision.sentence),
}
"""The kind and the sentence of errors of the client; the first that fits."""
STATUSES: dict[int, tuple[type[StoreError], str]] = {
    401: (StoreRefused, f"the Hub does not accept the token ({{reason}}). {REMEDY}"),
    **dict.fromkeys((404, 405, 501), (Unsupported, Unsupported.sentence)),
    412: (StoreMoved, StoreMoved.sentence),
}
"""The same of other answers of the Hub."""
NO_XET = (
    "{endpoint} has no Xet storage for large files ({short}). Set HF_HUB_DISABLE_XET=1 in the "
    "environment."
)


@contextmanager
def translate_errors(
    name: str, revision: str, not_found: type[StoreRefused] = Unsupported
) -> Iterator[None]:
    """`translate` any error; those of this machine's disk stay OSErrors."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            if error.filename == constants.HF_TOKEN_PATH:
                raise StoreRefused(
                    f"the file of the token, {error.filename}, cannot be read: {error.strerror}. "
                    "Set HF_TOKEN, or HF_HOME to a folder that can be used.",
                    "no token",
                ) from error
            raise
        if (match := XET_DISK_ERROR.search(str(error))) and int(match[1]) in DISK_ERRORS:
            raise OSError(int(match[1]), os.strerror(int(match[1]))) from error
        raise translate(error, name, revision, not_found) from error


def translate(
    error: BaseException, name: str, revision: str, not_found: type[StoreRefused] = Unsupported
) -> StoreError:
    """The StoreError of the right kind for any error of the Hub client.

    `not_found` is the kind for a 404 from a server that does not send X-Error-Code.
    """
    failure = failure_of(error)
    if isinstance(failure, StoreError):
        return failure
    kind, sentence = _kind_of(failure, not_found)
    is_type = failure.status is None and not failure.may_pass  # whose name says more
    message = sentence.format(
        name=name,
        revision=revision,
        at=revision[:8] or "its head",
        server="the Hub's storage" if failure.is_xet else "the Hub",
        endpoint=redact_secrets(constants.ENDPOINT),
        short=failure.short,
        reason=failure,
        detail=f"{failure.short}: {failure}" if is_type else failure,
    )
    return kind(message, failure.short, failure.retry_after, failure.timed_out)


def _kind_of(failure: Failure, not_found: type[StoreRefused]) -> tuple[type[StoreError], str]:
    """The kind of a failure, and its sentence."""
    cause, status = failure.cause, failure.status
    response = getattr(cause, "response", None)
    names_nothing = response is not None and "X-Error-Code" not in response.headers
    if status == 404 and names_nothing:
        return not_found, not_found.sentence
    for of, found in CAUSES.items():
        if isinstance(cause, of):
            return found
    if status == 404 and not_found is NoFile:
        return NoFile, NoFile.sentence
    if failure.may_pass:
        return StoreUnreachable, StoreUnreachable.sentence
    if failure.is_xet:
        lacks_xet = "xet-write-token" in str(cause) and status != 403
        return StoreRefused, NO_XET if lacks_xet else StoreRefused.sentence
    if status is None:
        return Unsupported, Unsupported.sentence
    return STATUSES.get(status, (StoreRefused, StoreRefused.sentence))
