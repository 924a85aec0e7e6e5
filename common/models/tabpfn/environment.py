"""What TabPFN reads from its surroundings when it is imported, fixed before that.

tabpfn reads `TABPFN_*` from the environment and from a `.env` file in the working folder (tabpfn/settings.py); a
variable that is set wins over that file, so every one is set here. Its dependencies write into the home folder:
matplotlib its font list, skrub a data folder. Both are sent into ours.
"""

from __future__ import annotations

import os

from common.settings import Settings

#: Everything that tabpfn's settings read.
FIXED = {
    "TABPFN_MODEL_VERSION": "v2",  # never used: models are handed over loaded
    "TABPFN_AUTH_GUI_URL": "http://127.0.0.1:9",  # nothing is to be reached
    "TABPFN_AUTH_API_URL": "http://127.0.0.1:9",
    "TABPFN_NO_BROWSER": "1",
    "TABPFN_ALLOW_CPU_LARGE_DATASET": "true",  # the product's limits say what a CPU may take
    "TABPFN_MPS_MEMORY_FRACTION": "0.7",
    "TABPFN_MAX_BATCHED_TEST_ROWS": "32768",
    "TABPFN_MAX_BATCHED_ESTIMATOR_ROWS": "32768",
    "TABPFN_MAX_BATCHED_ESTIMATOR_CELLS": "768000000",
    "TABPFN_MODEL_CACHE_SIZE": "0",  # one module a device is shared here, whatever the task
}


def fix() -> None:
    """Set the variables of this process; matplotlib's and skrub's folders stay where someone has put them."""
    cache = Settings.load().data / "cache"
    os.environ.update(FIXED, TABPFN_MODEL_CACHE_DIR=str(cache / "tabpfn"))
    os.environ.setdefault("MPLCONFIGDIR", str(cache / "matplotlib"))
    os.environ.setdefault("SKB_DATA_DIRECTORY", str(cache / "skrub"))
