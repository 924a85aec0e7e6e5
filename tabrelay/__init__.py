"""Tabrelay: a table goes in once, answers come out at once.

`import tabrelay` is cheap; what a name needs is imported when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tabrelay import client as _client

    Client = _client.Client
    Dataset = _client.Dataset
    Job = _client.Job
    Model = _client.Model
    Prediction = _client.Prediction
    TabrelayHTTPError = _client.TabrelayHTTPError

__all__ = ["Client", "Dataset", "Job", "Model", "Prediction", "TabrelayHTTPError", "__version__"]

__version__ = "0.1.0"

_HOMES = dict.fromkeys(
    ["Client", "Dataset", "Job", "Model", "Prediction", "TabrelayHTTPError"], "tabrelay.client"
)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
