"""The Python client: `tabrelay.Client`, what it returns and what it raises."""

from tabrelay.client.answers import Prediction
from tabrelay.client.client import Client
from tabrelay.client.errors import (
    BadRequest,
    Conflict,
    ConnectionFailed,
    DeadlinePassed,
    FieldError,
    Gone,
    Invalid,
    JobCancelled,
    JobEnded,
    JobFailed,
    NotAuthorized,
    NotFound,
    Overloaded,
    ServerError,
    StorageFull,
    TabrelayHTTPError,
    TooLarge,
    Unavailable,
    UnsupportedMedia,
)
from tabrelay.client.types import Dataset, Job, JobError, Model, Readiness, Version
from tabrelay.client.wire import Pace

__all__ = [
    "BadRequest",
    "Client",
    "Conflict",
    "ConnectionFailed",
    "Dataset",
    "DeadlinePassed",
    "FieldError",
    "Gone",
    "Invalid",
    "Job",
    "JobCancelled",
    "JobEnded",
    "JobError",
    "JobFailed",
    "Model",
    "NotAuthorized",
    "NotFound",
    "Overloaded",
    "Pace",
    "Prediction",
    "Readiness",
    "ServerError",
    "StorageFull",
    "TabrelayHTTPError",
    "TooLarge",
    "Unavailable",
    "UnsupportedMedia",
    "Version",
]
