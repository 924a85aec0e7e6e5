"""What the OpenAPI document says of bodies; the examples are those of docs/http.md."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Shown(BaseModel):
    """Base of the documented bodies; answers may gain fields."""

    model_config = ConfigDict(extra="allow")


class FieldFault(Shown):
    """One fault of one field or column."""

    field: str
    message: str


class Problem(Shown):
    """RFC 9457 problem."""

    type: str = Field(examples=["urn:tabrelay:problem:invalid_rows"])
    title: str
    status: int
    code: str = Field(description="Stable; see docs/http.md.", examples=["invalid_rows"])
    detail: str
    errors: list[FieldFault] = []
    request_id: str


class Fit(Shown):
    """An inline fit; a file goes as multipart with the same fields beside `file`."""

    dataset: str = Field(examples=["churn"])
    target: str = Field(examples=["y"])
    columns: list[str] = Field(default=[], examples=[["a", "y"]])
    rows: list[list[Any]] = Field(default=[], examples=[[[1, "no"], [2, "yes"]]])
    model: str | None = None
    task: str | None = Field(
        default=None, description="classification or regression; told by the target when not given"
    )
    options: dict[str, Any] | None = Field(
        default=None, examples=[{"n_estimators": 8, "precision": "fp16", "schema": {"ignore": ["id"]}}]
    )
    priority: str | None = Field(default=None, description="interactive (when not given) or batch")
    deadline_s: float | None = Field(
        default=None,
        description="the job fails with `timeout` this long after its submission",
        examples=[600],
    )
    ttl_s: float | None = Field(
        default=None, description="the dataset is deleted this long after its latest fit", examples=[86400]
    )


class Job(Shown):
    """A fit job."""

    id: str
    state: str = Field(description="queued, running, succeeded, failed or cancelled")
    phase: str | None = None
    fraction: float = Field(description="of the phase")
    progress: float = Field(description="of the whole job, over all phases; never falls within an attempt")
    dataset: str
    version: int
    model: str
    task: str | None = None
    licence: str | None = Field(default=None, description="of the model, and so of the answers")
    rows: int | None = None
    columns: int | None = None
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="how each column is used; not in lists and events"
    )
    queue_position: int | None = None
    eta_s: float | None = Field(
        default=None, description="seconds until the end, from what this host measured and the job's own pace"
    )
    attempt: int
    created_at: str
    started_at: str | None = None
    finished_at: str | None = None
    timings_ms: dict[str, float] = {}
    context: str | None = None
    context_bytes: int | None = None
    precision: str | None = Field(default=None, description="native, fp16 or int8, once it is published")
    cache: str | None = Field(default=None, description="kv or repr, once it is published")
    largest_difference: float | None = Field(
        default=None,
        description="from the answers as computed, for a few training rows: of a probability, or of a mean in standard "
        "deviations of the target",
    )
    error: dict[str, Any] | None = None


class EventsHeaders(BaseModel):
    """Where a stream goes on."""

    last_event_id: str | None = Field(
        default=None,
        alias="Last-Event-ID",
        description="the last id that was read; everything after it follows",
    )


class Jobs(Shown):
    """A page of jobs, newest first."""

    jobs: list[Job]
    next: str | None = None


class JobsQuery(BaseModel):
    """Which jobs."""

    state: str | None = None
    dataset: str | None = None
    limit: int = 50
    cursor: str | None = None


class Dataset(Shown):
    """A dataset."""

    name: str
    version: int
    model: str
    task: str
    rows: int
    columns: int
    bytes: int
    pinned: bool
    expires_at: str | None = Field(
        default=None, description="deleted soon after, unless pinned or fitted again before"
    )


class Datasets(Shown):
    """A page of datasets by name."""

    datasets: list[Dataset]
    next: str | None = None


class PageQuery(BaseModel):
    """Where to go on."""

    limit: int = 50
    cursor: str | None = None


class Pin(Shown):
    """Whether every version is kept."""

    pinned: bool = True


class Rows(Shown):
    """Rows to predict, as columns and rows or as records; `null` is a gap."""

    columns: list[str] = Field(default=[], examples=[["a"]])
    rows: list[list[Any]] = Field(default=[], examples=[[[3]]])
    records: list[dict[str, Any]] | None = None


class PredictQuery(BaseModel):
    """What is wanted."""

    version: int | None = Field(default=None, description="the current one when not given")
    output: str | None = Field(
        default=None,
        description="proba or label; mean, median, mode or quantiles, as far as the model has them: `outputs` of /v1/models",
    )
    quantiles: str | None = Field(default=None, description="levels, such as 0.05,0.5,0.95")
    threshold: float | None = Field(
        default=None, description="of two classes the second one is predicted from this probability on"
    )
    encoding: str | None = Field(default=None, description="of a CSV body that is not UTF-8")
    deadline_ms: int | None = None


class Prediction(Shown):
    """Answers, one a row."""

    dataset: str
    version: int
    context: str
    model: str
    task: str
    predictions: list[Any]
    classes: list[Any] | None = None
    probabilities: list[list[float]] | None = None
    mean: list[float] | None = None
    median: list[float] | None = None
    mode: list[float] | None = None
    quantiles: list[list[float]] | None = None
    worker: str
    timings_ms: dict[str, float]


class OneShot(Shown):
    """A small training table and the rows to answer from it; at most 1,024 rows and 100 columns in all."""

    train_features: list[Any] | dict[str, Any] = Field(
        description="rows, records, or an object of columns", examples=[[[1, "a"], [2, "b"], [3, "a"]]]
    )
    train_labels: list[Any] = Field(
        description="a label for each training row", examples=[["no", "yes", "no"]]
    )
    eval_features: list[Any] | dict[str, Any] = Field(examples=[[[2, "a"]]])
    columns: list[str] | None = Field(default=None, description="names, where features are rows")
    model: str | None = None
    task: str | None = Field(
        default=None, description="classification or regression; told by the labels when not given"
    )
    output: str | None = Field(default=None, description="proba, label; mean, quantiles")
    quantiles: list[float] | None = Field(default=None, examples=[[0.05, 0.5, 0.95]])
    options: dict[str, Any] | None = Field(default=None, examples=[{"n_estimators": 4, "seed": 42}])


class OneShotQuery(BaseModel):
    """How long the answer may take."""

    deadline_ms: int | None = None


class OneShotPrediction(Shown):
    """Answers, one a row of `eval_features`."""

    context: str = Field(description="names the training table's context within the tenant")
    reused: bool = Field(description="whether the context was there before")
    model: str
    task: str
    n_estimators: int
    predictions: list[Any]
    classes: list[Any] | None = None
    probabilities: list[list[float]] | None = None
    mean: list[float] | None = None
    quantiles: list[list[float]] | None = None
    worker: str
    timings_ms: dict[str, float]


class Models(Shown):
    """The served models."""

    models: list[dict[str, Any]]
    default: str
