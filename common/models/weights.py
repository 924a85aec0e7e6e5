"""Resolving models before a stack starts (placeholder without the download)."""

from __future__ import annotations

import json
import sys

from common.models.registry import Registry
from common.settings import Settings


def main() -> None:
    settings = Settings.load()
    paths = dict(settings.model_paths)
    default = settings.default_model
    for given in sys.argv[2:]:
        name, _, path = given.partition("=")
        if path:
            paths[name] = path
        default = name.partition(":")[0]
    registry = Registry(settings.model_copy(update={"model_paths": paths, "default_model": default}))
    print(json.dumps({"default_model": registry.default_model(), "model_paths": paths, "notes": []}))


if __name__ == "__main__":
    main()
