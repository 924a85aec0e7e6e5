"""Every error that Tabrelay reports, in one tree.

TabrelayError
├── MalformedBody           400  malformed_body
├── Forbidden               403  forbidden
│   └── LicenceNotAccepted       licence_not_accepted
├── NotFound                404  not_found
│   ├── DatasetNotFound          dataset_not_found
│   ├── VersionNotFound          version_not_found
│   ├── JobNotFound              job_not_found
│   └── ModelNotFound            model_not_found
├── Conflict                409  conflict
├── ContextGone             410  context_gone
│   ├── ContextDamaged           context_damaged
│   └── ContextIncompatible      context_incompatible
├── TooLarge                413  too_large
├── UnsupportedMediaType    415  unsupported_media_type
├── Invalid                 422  invalid
│   ├── InvalidTable             invalid_table
│   ├── InvalidTarget            invalid_target
│   ├── InvalidRows              invalid_rows
│   └── InvalidRequest           invalid_request
├── Overloaded              429  overloaded
│   ├── QueueFull                queue_full
│   └── WorkerBusy               worker_busy
├── InternalError           500  internal_error
│   └── VerificationFailed       verification_failed
├── Unavailable             503  unavailable
│   ├── CatalogueUnavailable     catalogue_unavailable
│   │   └── CatalogueEmptied     catalogue_emptied
│   ├── NoPredictWorker          no_predict_worker
│   ├── DeviceFull               device_full
│   ├── ModelNotReady            model_not_ready
│   ├── FilesBusy                files_busy
│   └── WorkerLost               worker_lost
├── DeadlinePassed          504  deadline_passed
├── FitTimeout              504  timeout
├── StorageFull             507  storage_full
└── Cancelled               499  cancelled

An error's docstring is its default message. `encode` and `decode` carry it between processes and into
job records; nothing else in the product knows an HTTP status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class FieldError:
    """One fault of one field or column, in words that say what would be right."""

    field: str
    message: str


class TabrelayError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Error"

    def __init__(
        self,
        detail: str | None = None,
        *,
        errors: Sequence[FieldError] = (),
        retry_after_s: float | None = None,
        **facts: Any,
    ) -> None:
        """`facts` are JSON values shown beside the problem, such as limit and size."""
        self.detail = detail or (type(self).__doc__ or "").strip().splitlines()[0]
        self.errors = tuple(errors)
        self.retry_after_s = retry_after_s
        self.facts = facts
        super().__init__(self.detail)

    def encode(self) -> dict[str, Any]:
        """A JSON object that `decode` turns into the same error."""
        return {
            "code": self.code,
            "status": self.status,
            "title": self.title,
            "detail": self.detail,
            "errors": [{"field": e.field, "message": e.message} for e in self.errors],
            "retry_after_s": self.retry_after_s,
            "facts": self.facts,
        }


class MalformedBody(TabrelayError):
    """The body can't be parsed."""

    code, status, title = "malformed_body", 400, "Malformed body"


class Forbidden(TabrelayError):
    """This is not allowed here."""

    code, status, title = "forbidden", 403, "Forbidden"


class LicenceNotAccepted(Forbidden):
    """The model's licence has not been accepted by whoever runs this service."""

    code = "licence_not_accepted"


class NotFound(TabrelayError):
    """There is no such thing."""

    code, status, title = "not_found", 404, "Not found"


class DatasetNotFound(NotFound):
    """There is no dataset of this name."""

    code = "dataset_not_found"


class VersionNotFound(NotFound):
    """The dataset has no such version."""

    code = "version_not_found"


class JobNotFound(NotFound):
    """There is no job with this id."""

    code = "job_not_found"


class ModelNotFound(NotFound):
    """There is no model of this name."""

    code = "model_not_found"


class Conflict(TabrelayError):
    """The request contradicts the present state."""

    code, status, title = "conflict", 409, "Conflict"


class ContextGone(TabrelayError):
    """The context's file is no longer there; fit the dataset again."""

    code, status, title = "context_gone", 410, "Context gone"


class ContextDamaged(ContextGone):
    """The context's file does not match its digest and is never used; fit the dataset again."""

    code = "context_damaged"


class ContextIncompatible(ContextGone):
    """The context was made for another format, state version or weights; fit the dataset again."""

    code = "context_incompatible"


class TooLarge(TabrelayError):
    """The request is over a limit."""

    code, status, title = "too_large", 413, "Too large"


class UnsupportedMediaType(TabrelayError):
    """The content type is not one of those accepted."""

    code, status, title = "unsupported_media_type", 415, "Unsupported media type"


class Invalid(TabrelayError):
    """A value can't be used."""

    code, status, title = "invalid", 422, "Invalid"


class InvalidTable(Invalid):
    """The table can't be used."""

    code = "invalid_table"


class InvalidTarget(Invalid):
    """The target column can't be used."""

    code = "invalid_target"


class InvalidRows(Invalid):
    """The rows don't fit the dataset's schema."""

    code = "invalid_rows"


class InvalidRequest(Invalid):
    """A field of the request can't be used."""

    code = "invalid_request"


class Overloaded(TabrelayError):
    """Too much at once; try again later."""

    code, status, title = "overloaded", 429, "Too many requests"


class QueueFull(Overloaded):
    """The fit queue is full; try again later."""

    code = "queue_full"


class WorkerBusy(Overloaded):
    """The predict worker has as many requests in flight as it may; try again later."""

    code = "worker_busy"


class InternalError(TabrelayError):
    """The service failed; the log names the cause under this request id."""

    code, status, title = "internal_error", 500, "Internal error"


class VerificationFailed(InternalError):
    """The context read back did not answer as the estimator that was just fitted; nothing was published."""

    code = "verification_failed"


class Unavailable(TabrelayError):
    """A part of the service is not available now; try again later."""

    code, status, title = "unavailable", 503, "Unavailable"


class CatalogueUnavailable(Unavailable):
    """The catalogue (Redis) can't be reached; try again later."""

    code = "catalogue_unavailable"


class CatalogueEmptied(CatalogueUnavailable):
    """The catalogue (Redis) was emptied or is another data folder's; nothing is deleted and known datasets go on answering; run `tabrelay catalogue rebuild` to restore it."""

    code = "catalogue_emptied"


class NoPredictWorker(Unavailable):
    """No predict worker could be reached in time; try again later."""

    code = "no_predict_worker"


class DeviceFull(Unavailable):
    """Pinned contexts and loads under way take all that a predict worker may hold; unpin a dataset or try again later."""

    code = "device_full"


class ModelNotReady(Unavailable):
    """The model's weights are not there."""

    code = "model_not_ready"


class FilesBusy(Unavailable):
    """The tenant's files are held by a process that does not let go; try again later."""

    code = "files_busy"


class WorkerLost(Unavailable):
    """The fit's worker died as often as a job may be tried."""

    code = "worker_lost"


class DeadlinePassed(TabrelayError):
    """The deadline passed before the answer was there."""

    code, status, title = "deadline_passed", 504, "Deadline passed"


class FitTimeout(TabrelayError):
    """The fit took longer than it may."""

    code, status, title = "timeout", 504, "Timeout"


class StorageFull(TabrelayError):
    """There is no room left on the storage tier."""

    code, status, title = "storage_full", 507, "Storage full"


class Cancelled(TabrelayError):
    """The job was cancelled."""

    code, status, title = "cancelled", 499, "Cancelled"


def _subclasses(of: type[TabrelayError]) -> list[type[TabrelayError]]:
    return [of, *(sub for direct in of.__subclasses__() for sub in _subclasses(direct))]


def decode(encoded: Mapping[str, Any]) -> TabrelayError:
    """The error that `TabrelayError.encode` wrote; an unknown code becomes an InternalError."""
    by_code = {cls.code: cls for cls in _subclasses(TabrelayError)}
    cls = by_code.get(str(encoded.get("code")), InternalError)
    return cls(
        encoded.get("detail"),
        errors=[FieldError(e["field"], e["message"]) for e in encoded.get("errors", ())],
        retry_after_s=encoded.get("retry_after_s"),
        **dict(encoded.get("facts") or {}),
    )
