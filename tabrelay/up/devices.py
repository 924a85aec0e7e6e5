"""Which worker gets which device, and how it is kept from seeing the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tabrelay.up.errors import CannotStart

_DEVICE = re.compile(r"cpu|cuda(?::(\d{1,3}))?")


@dataclass(frozen=True)
class Device:
    """One worker's device as it sees it, and the `CUDA_VISIBLE_DEVICES` that makes it so."""

    name: str
    visible: str


def assign(devices: str, workers: int | None, environ: Mapping[str, str]) -> list[Device]:
    """A device for each worker: one worker a device, or `workers` in turn over the comma-separated `devices`."""
    listed = [_device(text.strip(), environ) for text in devices.split(",") if text.strip()]
    if not listed:
        raise CannotStart(f"{devices!r} names no device; cpu or cuda:0,cuda:1 would")
    count = len(listed) if workers is None else workers
    if count < 1:
        raise CannotStart("at least one worker of each kind is needed")
    if count < len(listed):
        raise CannotStart(f"{count} workers can't use the {len(listed)} devices {devices}")
    return [listed[at % len(listed)] for at in range(count)]


def _device(text: str, environ: Mapping[str, str]) -> Device:
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise CannotStart(f"{text!r} is no device; cpu, cuda:0 or cuda:0,cuda:1 would be")
    if text == "cpu":
        return Device("cpu", "")
    index = int(match[1] or 0)
    # A list that is set already, as batch systems do, is what cuda:0, cuda:1, ... count in.
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return Device("cuda:0", str(index))
    seen = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    if index >= len(seen):
        shown = environ["CUDA_VISIBLE_DEVICES"]
        raise CannotStart(f"there is no {text}: CUDA_VISIBLE_DEVICES={shown} leaves {len(seen)} CUDA devices")
    return Device("cuda:0", seen[index])
