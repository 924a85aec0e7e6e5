"""What the client raises, in one tree.

TabrelayHTTPError
├── ConnectionFailed        no answer: refused, lost or silent for too long
├── BadRequest         400
├── NotAuthorized      401, 403
├── NotFound           404
├── Conflict           409
├── Gone               410
├── TooLarge           413
├── UnsupportedMedia   415
├── Invalid            422  (also raised before sending, with no status)
├── Overloaded         429
├── ServerError        5xx
│   ├── Unavailable    503
│   ├── DeadlinePassed 504
│   └── StorageFull    507
└── JobEnded                a fit that was waited for has no result
    ├── JobFailed
    └── JobCancelled

`code` is the stable name to branch on; `str(error)` is one line for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

    from tabrelay.client.types import Job

#: Members of a problem that have a place of their own; all others are facts.
_PROBLEM_MEMBERS = frozenset(
    {"type", "title", "status", "code", "detail", "errors", "request_id", "instance"}
)
#: Longest part of an answer that is no problem document, as a gateway's page, shown in a message.
_EXCERPT_CHARACTERS = 200

#: Field errors that a message holds; `errors` has them all.
_SHOWN_ERRORS = 5


@dataclass(frozen=True)
class FieldError:
    """One fault of one field or column."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class TabrelayHTTPError(Exception):
    """The service did not do what was asked."""

    def __init__(
        self,
        detail: str | None = None,
        *,
        code: str = "error",
        status: int | None = None,
        errors: Sequence[FieldError] = (),
        request_id: str | None = None,
        retry_after_s: float | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """`facts` are further members of the problem, such as `limit` and `size`."""
        self.detail = detail or (type(self).__doc__ or "").strip().splitlines()[0]
        self.code = code
        self.status = status
        self.errors = tuple(errors)
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.facts = dict(facts or {})
        super().__init__(self.detail)

    def __str__(self) -> str:
        text = _one_line(self.detail)
        new = [error for error in self.errors if not _is_told(error, text)]
        if new:
            shown = [_one_line(str(error)) for error in new[:_SHOWN_ERRORS]]
            more = [f"and {len(new) - _SHOWN_ERRORS} more"] if len(new) > _SHOWN_ERRORS else []
            text = f"{text.rstrip('.')}: {'; '.join(shown + more)}"
        marks = [mark for mark in (self.code if self.code != "error" else None, self.request_id) if mark]
        return f"{text} [{' '.join(marks)}]" if marks else text


class ConnectionFailed(TabrelayHTTPError):
    """The service can't be reached."""


class BadRequest(TabrelayHTTPError):
    """The request can't be parsed."""


class NotAuthorized(TabrelayHTTPError):
    """The API key is missing, unknown, or has not the role for this."""


class NotFound(TabrelayHTTPError):
    """There is no such thing."""


class Conflict(TabrelayHTTPError):
    """The request contradicts the present state."""


class Gone(TabrelayHTTPError):
    """The context is no longer there; fit the dataset again."""


class TooLarge(TabrelayHTTPError):
    """The request is over a limit."""


class UnsupportedMedia(TabrelayHTTPError):
    """The content type is not one of those accepted."""


class Invalid(TabrelayHTTPError):
    """A value can't be used."""


class Overloaded(TabrelayHTTPError):
    """Too much at once; try again later."""


class ServerError(TabrelayHTTPError):
    """The service failed."""


class Unavailable(ServerError):
    """A part of the service is not available now; try again later."""


class DeadlinePassed(ServerError):
    """The deadline passed before the answer was there."""


class StorageFull(ServerError):
    """There is no room left on the service's storage."""


class JobEnded(TabrelayHTTPError):
    """The fit ended without a result."""

    def __init__(self, job: Job) -> None:
        """`job` is the last state that was seen."""
        self.job = job
        error = job.error
        super().__init__(
            f"{_one_line(error.detail)} (job {job.id})"
            if error
            else f"the fit was {job.state} (job {job.id})",
            code=error.code if error else job.state,
            status=error.status if error else None,
            errors=error.errors if error else (),
            facts=error.facts if error else None,
        )


class JobFailed(JobEnded):
    """The fit failed."""


class JobCancelled(JobEnded):
    """The fit was cancelled."""


_BY_STATUS: Mapping[int, type[TabrelayHTTPError]] = {
    400: BadRequest,
    401: NotAuthorized,
    403: NotAuthorized,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: TooLarge,
    415: UnsupportedMedia,
    422: Invalid,
    429: Overloaded,
    503: Unavailable,
    504: DeadlinePassed,
    507: StorageFull,
}


def from_response(response: httpx.Response) -> TabrelayHTTPError:
    """The error that an answer with a status other than 2xx stands for."""
    status = response.status_code
    fallback = ServerError if status >= 500 else TabrelayHTTPError
    problem = _problem(response)
    retry_after_s = parse_retry_after(response.headers.get("Retry-After"))
    detail = problem.get("detail") or problem.get("title") or _excerpt(response)
    return _BY_STATUS.get(status, fallback)(
        str(detail),
        code=str(problem.get("code") or f"http_{status}"),
        status=status,
        errors=field_errors(problem.get("errors")),
        request_id=_text_or_none(problem.get("request_id") or response.headers.get("X-Request-Id")),
        retry_after_s=retry_after_s,
        facts={name: value for name, value in problem.items() if name not in _PROBLEM_MEMBERS},
    )


def field_errors(value: Any) -> tuple[FieldError, ...]:
    """The `errors` member of a problem or of a job's error; anything unreadable is left out."""
    if not isinstance(value, list):
        return ()
    return tuple(
        FieldError(str(item.get("field") or ""), str(item.get("message") or ""))
        for item in value
        if isinstance(item, dict)
    )


def parse_retry_after(value: str | None) -> float | None:
    """Seconds of a `Retry-After` header, given as seconds or as a date; None when it says nothing."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        problem = json.loads(response.content)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def _excerpt(response: httpx.Response) -> str:
    text = "" if "html" in response.headers.get("Content-Type", "") else response.text.strip()
    said = f": {text[:_EXCERPT_CHARACTERS]}" if text else ""
    return f"the service answered {response.status_code} {response.reason_phrase}{said}"


def _is_told(error: FieldError, text: str) -> bool:
    """Whether the detail says already what a field's error says."""
    return all(word in text for word in f"{error.field} {error.message}".split())


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)
