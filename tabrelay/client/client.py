"""The client: one method a thing that the service does."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Self
from urllib.parse import quote

import httpx

from tabrelay.client import answers
from tabrelay.client.answers import Prediction
from tabrelay.client.errors import Unavailable
from tabrelay.client.tables import (
    ARROW_STREAM,
    FileBody,
    InlineBody,
    Table,
    columns_of,
    has_pyarrow,
    labels_of,
    rows_body,
    training_body,
)
from tabrelay.client.types import Dataset, Job, Model, Readiness
from tabrelay.client.watch import Watch
from tabrelay.client.wire import Call, Pace, Wire, read_object, unreadable

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 60.0
PAGE = 100

OnProgress = Callable[[Job], None]


class Client:
    """Talks to one Tabrelay service; safe to share between threads.

    >>> client = Client("http://127.0.0.1:8000")
    >>> client.fit("churn.csv", target="churned", dataset="churn")
    >>> client.predict("churn", [{"plan": "basic", "calls": 3}]).predictions
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        transport: httpx.BaseTransport | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`url` and `api_key` default to TABRELAY_URL and TABRELAY_API_KEY.

        `timeout_s` bounds each call with its retries; a fit that is waited for may take longer.
        """
        url = url or os.environ.get("TABRELAY_URL") or DEFAULT_URL
        key = api_key if api_key is not None else os.environ.get("TABRELAY_API_KEY")
        self.timeout_s = timeout_s
        self._pace = pace or Pace()
        self._wire = Wire(
            url if "://" in url else f"http://{url}", key or None, transport=transport, pace=self._pace
        )

    @property
    def url(self) -> str:
        """Where the service is, without credentials."""
        return self._wire.shown_url

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept connections."""
        self._wire.close()

    # Fits

    def fit(
        self,
        data: Table,
        target: str,
        dataset: str,
        *,
        model: str | None = None,
        task: str | None = None,
        options: Mapping[str, Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        encoding: str | None = None,
        priority: str | None = None,
        deadline_s: float | None = None,
        ttl_s: float | None = None,
        wait: bool = True,
        on_progress: OnProgress | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Fit `data` as the dataset's next version and wait until it answers predicts.

        `data` is a path (CSV, Parquet, Arrow), a pandas DataFrame, a pyarrow Table or a list of dicts, the target
        column included. Raises JobFailed or JobCancelled when the fit ends without a result. With `wait=False` it
        is `submit`. `schema` says what columns are where the service would guess otherwise: lists of names under `categorical`,
        `numeric`, `datetime` and `ignore`, and spellings of a missing cell under `missing`. `encoding` is of a CSV file that
        is not UTF-8, such as `latin-1`. `priority` is `interactive` or
        `batch`; `deadline_s` bounds the job from its submission; a dataset with `ttl_s` is deleted so long after its
        latest fit.
        """
        job = self.submit(
            data,
            target,
            dataset,
            model=model,
            task=task,
            options=options,
            schema=schema,
            encoding=encoding,
            priority=priority,
            deadline_s=deadline_s,
            ttl_s=ttl_s,
            idempotency_key=idempotency_key,
        )
        return self.wait(job, on_progress=on_progress) if wait else job

    def submit(
        self,
        data: Table,
        target: str,
        dataset: str,
        *,
        model: str | None = None,
        task: str | None = None,
        options: Mapping[str, Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        encoding: str | None = None,
        priority: str | None = None,
        deadline_s: float | None = None,
        ttl_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Ask for a fit; returns at once with the job, which has ended if this content is already current."""
        if schema is not None:
            options = {**(options or {}), "schema": schema}
        given = {
            "dataset": dataset,
            "target": target,
            "model": model,
            "task": task,
            "options": options,
            "encoding": encoding,
            "priority": priority,
            "deadline_s": deadline_s,
            "ttl_s": ttl_s,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        body = training_body(data)
        call = Call(
            "POST",
            "/v1/fits",
            headers={"Idempotency-Key": idempotency_key or uuid.uuid4().hex},
            body=lambda: _fit_body(fields, body),
        )
        try:
            return Job.decode(self._json(call))
        finally:
            if isinstance(body, FileBody):
                body.close()

    def wait(self, job: Job | str, *, on_progress: OnProgress | None = None) -> Job:
        """Wait for a job's end; raises JobFailed or JobCancelled when it has no result."""
        last = None
        for last in self.watch(job):
            if on_progress is not None:
                on_progress(last)
        if last is None:
            raise AssertionError("a watch yields at least the job's end")
        return last.raise_for_state()

    def watch(self, job: Job | str) -> Iterator[Job]:
        """Each state of a job that differs from the one before, up to its end.

        Reads the service's stream of events and resumes it after a cut; where there is none, asks again and again.
        """
        seen = None
        job_id = job
        if isinstance(job, Job):
            job_id = job.id
            seen = job
            yield job
            if job.ended:
                return
        path = f"/v1/jobs/{_segment(str(job_id))}"
        with closing(Watch(self._wire, self._pace, path, self.timeout_s).states()) as states:
            for now in states:
                if now != seen:
                    yield now
                seen = now

    def job(self, job_id: str) -> Job:
        """One job as it is now."""
        return Job.decode(self._json(Call("GET", f"/v1/jobs/{_segment(job_id)}")))

    def jobs(self, *, state: str | None = None, dataset: str | None = None, limit: int = PAGE) -> list[Job]:
        """The newest jobs, at most `limit`."""
        params = {"state": state, "dataset": dataset}
        return [Job.decode(item) for item in self._pages("/v1/jobs", "jobs", params, limit)]

    def cancel(self, job_id: str) -> Job:
        """Cancel a job; Conflict when it has ended already."""
        return Job.decode(self._json(Call("DELETE", f"/v1/jobs/{_segment(job_id)}")))

    def retry(self, job_id: str) -> Job:
        """Fit a failed or cancelled job's table once more, as a new job; Conflict when it is no longer kept."""
        return Job.decode(self._json(Call("POST", f"/v1/jobs/{_segment(job_id)}/retry")))

    def dead_letters(self) -> list[Job]:
        """Jobs that failed because their worker died each time; their tables are kept for a `retry`."""
        return [Job.decode(item) for item in self._json(Call("GET", "/v1/dead-letters")).get("jobs") or ()]

    # Predicts

    def predict(
        self,
        dataset: str,
        rows: Table,
        *,
        version: int | None = None,
        output: str | None = None,
        quantiles: Sequence[float] | None = None,
        threshold: float | None = None,
        encoding: str | None = None,
        deadline_s: float | None = None,
    ) -> Prediction:
        """Answer `rows` from the dataset's current version, or from `version`.

        `rows` is a DataFrame, a pyarrow Table, a list of dicts or a path; columns match by name. `output` is `proba`,
        `label`, `mean`, `median`, `mode` or `quantiles`, as far as the model has it; of two classes the second one is
        predicted from probability `threshold` on. `encoding` is of a CSV file that is not UTF-8. DataFrames and tables travel as Arrow, so numbers stay as they are.
        """
        body = rows_body(rows)
        params: dict[str, Any] = {
            "version": version,
            "output": output,
            "threshold": threshold,
            "encoding": encoding,
        }
        if quantiles is not None:
            params["quantiles"] = ",".join(f"{level!r}" for level in quantiles)
        as_arrow = body.media_type != "application/json" and has_pyarrow()
        call = Call(
            "POST",
            f"/v1/datasets/{_segment(dataset)}/predict",
            params=_given(params),
            headers={
                "Content-Type": body.media_type,
                "Accept": f"{ARROW_STREAM}, application/json;q=0.5" if as_arrow else "application/json",
            },
            body=lambda: _raw_body(body),
            tells_deadline=deadline_s is not None,
        )
        try:
            response = self._wire.send(call, self.timeout_s if deadline_s is None else deadline_s)
        finally:
            body.close()
        try:
            return answers.decode(response, output)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable(response, error) from error

    def predict_once(
        self,
        train_features: Table,
        train_labels: Sequence[Any],
        eval_features: Table,
        *,
        model: str | None = None,
        task: str | None = None,
        output: str | None = None,
        quantiles: Sequence[float] | None = None,
        options: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
    ) -> Prediction:
        """Answer `eval_features` from a small training table that goes along; nothing is stored.

        Tables are DataFrames, pyarrow Tables or lists of dicts, of at most 1,024 rows in all; fit a dataset for more.
        """
        given = {
            "train_features": columns_of(train_features),
            "train_labels": labels_of(train_labels),
            "eval_features": columns_of(eval_features),
            "model": model,
            "task": task,
            "output": output,
            "quantiles": None if quantiles is None else list(quantiles),
            "options": options,
        }
        call = Call(
            "POST",
            "/v1/predict",
            body=lambda: _json_body(_given(given)),
            tells_deadline=deadline_s is not None,
        )
        response = self._wire.send(call, self.timeout_s if deadline_s is None else deadline_s)
        try:
            return answers.decode(response, output)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable(response, error) from error

    # Datasets

    def datasets(self) -> list[Dataset]:
        """All datasets."""
        return [Dataset.decode(item) for item in self._pages("/v1/datasets", "datasets", {}, None)]

    def dataset(self, name: str) -> Dataset:
        """One dataset with its versions."""
        return Dataset.decode({"name": name} | self._json(Call("GET", f"/v1/datasets/{_segment(name)}")))

    def delete(self, name: str) -> None:
        """Delete a dataset with all its versions and files."""
        self._wire.send(Call("DELETE", f"/v1/datasets/{_segment(name)}"), self.timeout_s)

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep a dataset loaded, or with `pinned=False` let it be demoted again."""
        call = Call("PUT", f"/v1/datasets/{_segment(name)}/pin", body=lambda: _json_body({"pinned": pinned}))
        self._wire.send(call, self.timeout_s)

    # The service

    def models(self) -> list[Model]:
        """The models that fits may name."""
        data = self._json(Call("GET", "/v1/models"))
        default = data.get("default")
        items = [item if isinstance(item, dict) else {"name": item} for item in data.get("models") or ()]
        return [
            Model.decode({"default": item.get("name") == default} | item)
            for item in items
            if item.get("name")
        ]

    def limits(self) -> dict[str, Any]:
        """What the service accepts, as it says it."""
        return self._json(Call("GET", "/v1/limits"))

    def workers(self) -> list[dict[str, Any]]:
        """The workers of all kinds, as the service describes them."""
        lists = [
            items for items in self._json(Call("GET", "/v1/workers")).values() if isinstance(items, list)
        ]
        return [item for items in lists for item in items if isinstance(item, dict)]

    def ready(self) -> Readiness:
        """Whether the service takes work now, and why not; raises ConnectionFailed when nothing answers."""
        try:
            self._wire.send(Call("GET", "/readyz"), 0.0)
        except Unavailable as error:
            missing = error.facts.get("missing")
            named = [f"{part}: {why}" for part, why in missing.items()] if isinstance(missing, dict) else []
            return Readiness(False, tuple(named) or (error.detail,))
        return Readiness(True)

    def _json(self, call: Call) -> dict[str, Any]:
        return read_object(self._wire.send(call, self.timeout_s))

    def _pages(
        self, path: str, key: str, params: Mapping[str, Any], limit: int | None
    ) -> Iterator[dict[str, Any]]:
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            size = PAGE if left is None else min(PAGE, left)
            page = self._json(Call("GET", path, params=_given({**params, "limit": size, "cursor": cursor})))
            items = [item for item in page.get(key) or () if isinstance(item, dict)]
            yield from items if left is None else items[:left]
            left = None if left is None else left - len(items)
            before, cursor = cursor, page.get("next")
            if cursor is None or cursor == before:
                return


@contextmanager
def _fit_body(fields: Mapping[str, Any], body: FileBody | InlineBody) -> Iterator[Mapping[str, Any]]:
    if isinstance(body, InlineBody):
        yield {"json": {**fields, "columns": body.columns, "rows": body.rows}}
        return
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    with body.opened() as file:
        yield {"data": texts, "files": {"file": (body.name, file, body.media_type)}}


@contextmanager
def _raw_body(body: FileBody) -> Iterator[Mapping[str, Any]]:
    with body.opened() as file:
        yield {"content": file}


@contextmanager
def _json_body(value: Any) -> Iterator[Mapping[str, Any]]:
    yield {"json": value}


def _given(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _segment(name: str) -> str:
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no name")
    return quote(name, safe="")
