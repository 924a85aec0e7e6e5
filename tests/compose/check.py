"""What the compose stack promises, checked from outside; standard library only. `run.sh` starts the stack.

The catalogue's answers come over the published port, facts about files and processes from inside the containers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from typing import Any

DOCKER = os.environ.get("DOCKER", "docker")
COMPOSE = shlex.split(os.environ.get("COMPOSE", "docker-compose"))
UID = "10001"

#: Prints what a context file says of itself: mode, whether its name is its digest, its tensors, its manifest's model.
LOOK_AT_CONTEXT = """
import json, os, sys
from blake3 import blake3
path = sys.argv[1]
data = open(path, "rb").read()
header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
manifest = json.loads(header.pop("__metadata__")["tabrelay"])
named = os.path.basename(path).removesuffix(".safetensors") == blake3(data).hexdigest()
print(json.dumps({
    "mode": oct(os.stat(path).st_mode & 0o777), "named": named, "tensors": len(header), "model": manifest["model"],
}))
"""

#: Kills the service's own process, as a crash would; the container's init ends with it.
CRASH = """
import glob, os, signal, sys
found = []
for path in glob.glob("/proc/[0-9]*/cmdline"):
    words = open(path).read().split("\\0")
    if words[1:3] == ["-m", sys.argv[1]]:
        found.append(int(path.split("/")[2]))
os.kill(min(found), signal.SIGKILL)
"""


class Stack:
    """The running stack: its HTTP side and its containers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of one call; an error's too."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data=body, headers=names, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def fit(self, dataset: str, csv: bytes, target: str) -> str:
        """Submit a CSV as a browser or curl would; returns the job's id."""
        boundary = uuid.uuid4().hex
        lines = []
        for name, value in (("dataset", dataset), ("target", target)):
            lines += [f"--{boundary}", f'Content-Disposition: form-data; name="{name}"', "", value]
        lines += [f"--{boundary}", 'Content-Disposition: form-data; name="file"; filename="table.csv"']
        lines += ["Content-Type: text/csv", ""]
        body = "\r\n".join(lines).encode() + b"\r\n" + csv + f"\r\n--{boundary}--\r\n".encode()
        status, job = self.call(
            "POST", "/v1/fits", body, Content_Type=f"multipart/form-data; boundary={boundary}"
        )
        assert status in (200, 202), (status, job)
        return str(job["id"])

    def job(self, job: str) -> Any:
        """A job as it stands."""
        status, shown = self.call("GET", f"/v1/jobs/{job}")
        assert status == 200, (status, shown)
        return shown

    def ended(self, job: str, timeout_s: float = 120.0) -> Any:
        """The job once it has succeeded."""
        shown = until(
            lambda: ended if (ended := self.job(job))["finished_at"] else None, timeout_s, "the job's end"
        )
        assert shown["state"] == "succeeded", shown
        return shown

    def predict(self, dataset: str, rows: list[list[Any]], deadline_ms: int = 30_000) -> Any:
        """The answer for rows of `table`'s features."""
        body = json.dumps({"columns": ["age", "plan"], "rows": rows}).encode()
        path = f"/v1/datasets/{dataset}/predict?deadline_ms={deadline_ms}"
        status, answer = self.call("POST", path, body, Content_Type="application/json")
        assert status == 200, (status, answer)
        return answer

    def container(self, service: str) -> str:
        """The id of the service's container."""
        return output(*COMPOSE, "ps", "-q", service)

    def run(self, service: str, *command: str) -> str:
        """What a command in the service's container prints."""
        return output(DOCKER, "exec", self.container(service), *command)

    def health(self, service: str) -> str:
        """What the container's health check found."""
        return output(DOCKER, "inspect", "--format", "{{.State.Health.Status}}", self.container(service))

    def restarts(self, service: str) -> int:
        """How often the engine has started the service's container again."""
        return int(output(DOCKER, "inspect", "--format", "{{.RestartCount}}", self.container(service)))


def output(*command: str) -> str:
    """What the command prints; its error when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr.strip()}"
    return done.stdout.strip()


def until(found: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Wait until it gives something true."""
    ends = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < ends, f"{what} did not come within {timeout_s:g} s"
        time.sleep(0.25)
    return value


def table(rows: int, seed: int) -> tuple[bytes, list[list[Any]], list[str]]:
    """A CSV whose target is nearly a rule of its features; the same as rows and labels."""
    rng = random.Random(seed)
    features: list[list[Any]] = []
    labels = []
    for _ in range(rows):
        age, plan = rng.randint(18, 90), rng.choice(["basic", "plus", "pro"])
        features.append([age, plan])
        labels.append("yes" if (age > 50) != (plan == "pro") else "no")
    lines = [f"{age},{plan},{label}" for (age, plan), label in zip(features, labels, strict=True)]
    return "\n".join(["age,plan,churned", *lines, ""]).encode(), features, labels


def ready(stack: Stack, timeout_s: float) -> None:
    """Wait until fits and predicts would be taken."""

    def answers() -> bool:
        try:
            return stack.call("GET", "/readyz")[0] == 200
        except (OSError, ValueError):
            return False

    until(answers, timeout_s, "/readyz")


def check_answers(stack: Stack) -> Any:
    """A fit and a predict, far better than guessing; returns the answer, which must not change."""
    csv, _, _ = table(600, seed=1)
    job = stack.ended(stack.fit("churn", csv, "churned"))
    _, rows, labels = table(200, seed=2)
    answer = stack.predict("churn", rows)
    right = sum(a == b for a, b in zip(answer["predictions"], labels, strict=True)) / len(labels)
    guess = max(labels.count("yes"), labels.count("no")) / len(labels)
    assert right > guess + 0.2, (right, guess)
    assert answer["context"] == job["context"], (answer["context"], job)
    assert all(abs(sum(row) - 1) < 1e-6 for row in answer["probabilities"])
    print(f"accuracy {right:.2f}, guessing {guess:.2f}, model {answer['model']}")
    return answer


def check_context(stack: Stack, digest: str) -> None:
    """The context is one safetensors file on the volume, named by its digest, and only ours to read."""
    path = f"/data/contexts/default/{digest}.safetensors"
    found = json.loads(stack.run("api", "python", "-c", LOOK_AT_CONTEXT, path))
    assert found["named"], found
    assert found["mode"] == "0o600", found
    assert found["tensors"] > 0, found
    copy = stack.run("predict", "ls", f"/host/default/{digest}.safetensors")
    print(f"context {digest[:12]}: {found['tensors']} tensors of {found['model']}; {copy} beside it")


def check_containers(stack: Stack) -> None:
    """No service of ours runs as root or can write beside its volumes; all are healthy."""
    for service in ("api", "fit", "predict"):
        assert stack.run(service, "id", "-u") == UID
        assert stack.run(service, "sh", "-c", "touch /app/x 2>/dev/null || echo refused") == "refused"
    for service in ("redis", "api", "fit", "predict"):
        until(lambda service=service: stack.health(service) == "healthy", 60, f"health of {service}")
    print("four healthy containers, ours without root and with a read-only root")


def check_crash(stack: Stack, answer: Any) -> None:
    """A predict worker that dies is started again, and a predict that is under way meanwhile gets its answer."""
    _, rows, _ = table(200, seed=2)
    stack.run("predict", "python", "-c", CRASH, "predict_workers")
    began = time.monotonic()
    same(stack.predict("churn", rows, deadline_ms=60_000), answer)
    took = time.monotonic() - began
    assert stack.restarts("predict") == 1
    print(f"predict worker crashed: answered after {took:.1f} s, by the one that was started in its place")


def check_killed_container(stack: Stack, answer: Any) -> None:
    """The same for a container that somebody killed, which the engine leaves to them to start."""
    _, rows, _ = table(200, seed=2)
    container = stack.container("predict")
    output(DOCKER, "kill", container)
    waiting: list[Any] = []
    asking = threading.Thread(target=lambda: waiting.append(stack.predict("churn", rows, deadline_ms=60_000)))
    asking.start()
    time.sleep(1)
    output(DOCKER, "start", container)
    asking.join()
    same(waiting[0], answer)
    same(stack.predict("churn", rows), answer)
    print("predict container killed and started: the predict that waited was answered, and so is the next")


def check_lost_fit(stack: Stack) -> None:
    """A job whose fit worker dies in the middle is fitted by the one that is started in its place."""
    csv, _, _ = table(5_000, seed=3)
    job = stack.fit("large", csv, "churned")
    until(
        lambda: stack.job(job)["phase"] in ("preprocessing", "encoding", "writing"), 60, "the fit's beginning"
    )
    stack.run("fit", "python", "-c", CRASH, "fit_workers")
    began = time.monotonic()
    ended = stack.ended(job, timeout_s=180)
    assert ended["attempt"] == 2, ended
    assert stack.restarts("fit") == 1
    print(
        f"fit worker crashed in a fit: attempt {ended['attempt']} ended after {time.monotonic() - began:.1f} s"
    )


def check_new_containers(stack: Stack, answer: Any) -> None:
    """Containers go, volumes stay: datasets answer as before."""
    _, rows, _ = table(200, seed=2)
    subprocess.run([*COMPOSE, "down", "--timeout", "10"], check=True, timeout=120)
    subprocess.run([*COMPOSE, "up", "-d"], check=True, timeout=180)
    ready(stack, 120)
    same(stack.predict("churn", rows), answer)
    print("all containers made anew: the dataset answers as before")


def same(answer: Any, expected: Any) -> None:
    """Answers of the same context are equal."""
    for field in ("context", "version", "predictions", "probabilities"):
        assert answer[field] == expected[field], field


def main() -> None:
    """Wait for the stack, then check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--ready-s", type=float, default=180.0)
    arguments = parser.parse_args()
    stack = Stack(arguments.url)
    began = time.monotonic()
    ready(stack, arguments.ready_s)
    print(f"ready after {time.monotonic() - began:.1f} s")
    answer = check_answers(stack)
    check_context(stack, answer["context"])
    check_containers(stack)
    check_crash(stack, answer)
    check_killed_container(stack, answer)
    check_lost_fit(stack)
    check_new_containers(stack, answer)
    print("compose stack: all checks passed")


if __name__ == "__main__":
    main()
