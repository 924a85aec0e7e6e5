"""`python -m fit_workers`: fit tables on one device."""

from __future__ import annotations

import os
import sys

#: The order of ensemble groups follows a set's order upstream (tabicl/_sklearn/preprocessing.py), so the same
#: table would differ in its last bits between processes with different hash seeds.
HASH_SEED = "0"


def run() -> None:
    """Start over with a fixed hash seed, then run the worker; SIGTERM means leave now and hand the job back."""
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "fit_workers", *sys.argv[1:]])  # noqa: S606  (this same program)
    os.environ["REMAP_SIGTERM"] = "SIGQUIT"
    from fit_workers.app import main

    main()


if __name__ == "__main__":
    run()
