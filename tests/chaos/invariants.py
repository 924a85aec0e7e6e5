"""Reads everything once all is quiet: the catalogue, the files, the answers that were given, the processes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from blake3 import blake3

from common.contexts.format import parse_header
from common.errors import ContextDamaged
from tests.chaos.expected import Content, Matrix, expected
from tests.chaos.load import ENDED, History
from tests.chaos.world import TENANT, World

#: An answer may differ from the library's by this much (docs/decisions/0003-bit-equality.md).
TOLERANCE = 1e-6
#: Contents whose answers are compared with the library's own; the others are compared with one another.
LIBRARY_MOST = 60
#: A Redis that is killed may forget what it took this long before, unless it fsyncs always.
FORGETS_MS = 2000
#: What a process may have grown by.
GROWTH_MIB = {"api": 150.0, "fit parent": 60.0, "predict": 300.0}


@dataclass
class Report:
    """What is broken, and what is worth telling."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def require(self, holds: Any, otherwise: str) -> None:
        """A fault unless it holds."""
        if not holds:
            self.faults.append(otherwise)

    def show(self) -> None:
        """Print it."""
        for note in self.notes:
            print("note:", note, flush=True)
        for fault in self.faults:
            print("BROKEN:", fault, flush=True)


@dataclass(frozen=True)
class Ended:
    """All jobs and versions, as the catalogue has them."""

    jobs: Mapping[str, Mapping[str, str]]
    versions: Mapping[str, Mapping[str, Mapping[str, Any]]]  # dataset, number

    @classmethod
    def read(cls, world: World) -> Ended:
        """From Redis itself."""
        jobs = {key.rpartition(":")[2]: world.redis.hgetall(key) for key in world.keys("job")}
        versions = {
            key.rpartition(":")[2]: {n: orjson.loads(text) for n, text in world.redis.hgetall(key).items()}
            for key in world.keys("versions", TENANT)
        }
        return cls(jobs, versions)


def check_jobs(
    report: Report, world: World, ended: Ended, history: History, redis_killed_ms: list[int], *, fsync: str
) -> None:
    """Every accepted job has ended, once."""
    forgotten = 0
    for accepted in history.accepted.values():
        job = ended.jobs.get(accepted.job)
        if job is None:
            excused = fsync == "everysec" and any(
                0 <= killed - accepted.at_ms <= FORGETS_MS for killed in redis_killed_ms
            )
            forgotten += excused
            report.require(excused, f"job {accepted.job} was accepted and is lost")
            continue
        report.require(
            job["state"] in ENDED,
            f"job {accepted.job} is {job['state']}, phase {job.get('phase')!r}, attempt {job['attempt']}",
        )
        if job["state"] == "failed":
            code = orjson.loads(job["error"])["code"]
            report.require(
                code in ("storage_full", "worker_lost", "catalogue_unavailable"),
                f"job {accepted.job} failed: {job['error'][:300]}",
            )
    told = Counter(job["state"] for job in ended.jobs.values())
    errors = Counter(orjson.loads(j["error"])["code"] for j in ended.jobs.values() if j["state"] == "failed")
    report.notes.append(f"{len(history.accepted)} accepted; all jobs: {dict(told)}, errors {dict(errors)}")
    if forgotten:
        report.notes.append(f"{forgotten} jobs went with a Redis that was killed within 2 s (everysec)")
    for job in ended.jobs.values():
        report.require(job["state"] in ENDED, f"job {job['id']} (never acknowledged) is {job['state']}")
        events = [entry for _, entry in world.redis.xrange(world.key("events", job["id"]))]
        ends = [e["state"] for e in events if e["state"] in ENDED]
        report.require(len(ends) <= 1, f"job {job['id']} ended {len(ends)} times: {ends}")
    attempts = sorted(int(job["attempt"]) for job in ended.jobs.values())
    report.notes.append(f"attempts a job: {dict(Counter(attempts))}")


def check_versions(report: Report, ended: Ended) -> None:
    """One version a job, one job a version, one digest a key."""
    by_job: dict[str, list[str]] = defaultdict(list)
    for dataset, versions in ended.versions.items():
        for number, version in versions.items():
            by_job[version["job"]].append(f"{dataset}/{number}")
            job = ended.jobs.get(version["job"])
            report.require(
                job is not None, f"{dataset}/{number} names job {version['job']}, which is not there"
            )
            if job is not None:
                report.require(
                    (job["state"], job["context"], job["version"], job["dataset"])
                    == ("succeeded", version["context"], number, dataset),
                    f"{dataset}/{number} and its job {job['id']} disagree: {version['context']} {dict(job)}",
                )
    for published, places in by_job.items():
        report.require(len(places) == 1, f"job {published} was published {len(places)} times: {places}")


def check_files(report: Report, world: World, ended: Ended, damaged: set[str]) -> None:
    """Every version's file is whole, and there is no file that nobody refers to."""
    contexts = world.data / "contexts" / TENANT
    by_key: dict[str, set[str]] = defaultdict(set)
    for dataset, versions in ended.versions.items():
        for number, version in versions.items():
            digest = version["context"]
            if digest in damaged:
                continue
            by_key[version["key"]].add(digest)
            path = contexts / f"{digest}.safetensors"
            if not path.exists():
                report.faults.append(f"{dataset}/{number}: {path.name} is not there")
                continue
            content = path.read_bytes()
            report.require(
                blake3(content).hexdigest() == digest, f"{dataset}/{number}: {path.name} is damaged"
            )
            try:
                parse_header(memoryview(content))
            except ContextDamaged as error:
                report.faults.append(f"{dataset}/{number}: {error}")
            table = world.data / "tables" / TENANT / f"{version['table']}.parquet"
            report.require(table.exists(), f"{dataset}/{number}: its table {table.name} is not there")
    for key, digests in by_key.items():
        report.require(len(digests) == 1, f"key {key[:12]} has {len(digests)} contexts: {sorted(digests)}")
    _check_orphans(report, world)


def _check_orphans(report: Report, world: World) -> None:
    dying = set(world.redis.smembers(world.key("dying", TENANT)))
    folders = {"context": world.data / "contexts" / TENANT, "table": world.data / "tables" / TENANT}
    for kind, folder in folders.items():
        orphans = [
            path.name
            for path in sorted(folder.iterdir())
            if not path.name.startswith(".")
            and not world.redis.exists(world.key("refs", TENANT, kind, path.stem))
            and f"{kind}:{path.stem}" not in dying
        ]
        if orphans:
            report.notes.append(f"{len(orphans)} {kind} files that nothing refers to: {orphans}")
        for key in world.keys("refs", TENANT, kind):
            path = folder / f"{key.rpartition(':')[2]}.{'safetensors' if kind == 'context' else 'parquet'}"
            report.require(
                path.exists(), f"{key} is referred to by {world.redis.smembers(key)} and is not there"
            )
    if dying:
        report.notes.append(f"{len(dying)} files wait for their removal")
    left = [*(world.data / "contexts").rglob(".*"), *(world.data / "uploads").glob("*")]
    if left:
        report.notes.append(
            f"{len(left)} temporary files that killed processes left: {[p.name for p in left]}"
        )


def check_catalogue(report: Report, world: World) -> None:
    """Queues, sets and leases are empty and agree."""
    for kind in ("wait", "turns", "queued", "pending"):
        left = world.keys(kind)
        report.require(not left, f"left in the catalogue when nothing runs: {left}")
    running = world.redis.zrange(world.key("running"), 0, -1)
    report.require(not running, f"leases without a running job: {running}")
    parents = {p.pid: p for p in world.fit_parents()}
    holds = world.keys("holds")
    held = world.held()
    if held:
        report.notes.append(
            f"{len(holds)} holds of ended jobs, {sum(pid not in parents for pid in held)} by processes that are gone"
        )
    for queue in ("fit.small", "fit.large"):
        waiting = world.redis.llen(world.key("celery", queue))
        report.require(not waiting, f"{waiting} wake-ups wait in {queue}")
    unacked = world.redis.hlen(world.key("celery", "unacked"))
    if unacked:
        report.notes.append(f"{unacked} wake-ups of killed workers wait for Celery's own redelivery")


def check_answers(report: Report, ended: Ended, history: History) -> None:
    """Every answer came from the context of the version that it names, and is the library's own."""
    published: dict[tuple[str, int], set[str]] = defaultdict(set)
    contents: dict[str, Content] = {}
    for job in ended.jobs.values():
        if job["state"] == "succeeded":
            published[job["dataset"], int(job["version"])].add(job["context"])
            known = history.accepted.get(job["id"])
            if known is not None:
                contents[job["context"]] = known.content
    seen: dict[str, list[tuple[int, Matrix]]] = defaultdict(list)
    unknown = 0
    for answer in history.answered:
        place = answer.dataset, answer.version
        if answer.context not in contents:
            unknown += 1  # its job was never acknowledged to a client, or is forgotten
            continue
        report.require(
            answer.context in published[place],
            f"{place} answered from {answer.context[:12]}, published there: {published[place]}",
        )
        seen[answer.context].append((answer.start, answer.probabilities))
    # Those asked of most are worth most.
    asked_of = Counter({digest: len(answers) for digest, answers in seen.items()})
    chosen = list(dict.fromkeys(contents[digest] for digest, _ in asked_of.most_common()))[:LIBRARY_MOST]
    right = expected(chosen)
    worst, exact, compared = 0.0, 0, 0
    for digest, answers in seen.items():
        whole = right.get(contents[digest])
        if whole is None:
            continue
        for start, probabilities in answers:
            off = float(np.abs(probabilities - whole[start : start + len(probabilities)]).max())
            worst, exact, compared = max(worst, off), exact + (off == 0), compared + 1
            report.require(
                off <= TOLERANCE, f"an answer of {digest[:12]}, rows {start}+, is off by {off:.3g}"
            )
    report.notes.append(
        f"{len(history.answered)} predicts answered, {compared} of them compared with the library on {len(chosen)} "
        f"tables: {exact} bit-equal, worst {worst:.3g}; {unknown} of jobs that no client knows"
    )


def check_memory(report: Report, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Nobody grew beyond a margin."""
    for kind, mib in after.items():
        report.notes.append(f"memory of {kind}: {before[kind]:.0f} MiB at the start, {mib:.0f} at the end")
        report.require(
            mib - before[kind] <= GROWTH_MIB[kind], f"{kind} grew from {before[kind]:.0f} to {mib:.0f} MiB"
        )


def tell_log(report: Report, log: Path) -> None:
    """What the processes wrote of faults: traces, by their last line."""
    traces: Counter[str] = Counter()
    inside = False
    for line in log.read_text(errors="replace").splitlines():
        text = line.partition(" | ")[2] or line
        if "Traceback (most recent call last)" in text:
            inside = True
        elif inside and text and not text.startswith((" ", "|")):
            traces[text[:160]] += 1
            inside = False
    for text, times in traces.most_common(20):
        report.notes.append(f"log: {times} traces end in {text}")
