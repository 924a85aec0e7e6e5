"""Names and ids: what a client may call a dataset, and what may touch the file system."""

from __future__ import annotations

import re
import unicodedata
import uuid

from common.errors import FieldError, InvalidRequest

_DATASET = re.compile(r"\w[\w.\-]{0,127}")
_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RULE = "1 to 128 letters, digits, '_', '-' or '.', the first a letter or a digit"


def dataset_name(given: object) -> str:
    """The name in Unicode's composed form; raises InvalidRequest that states the rule."""
    if isinstance(given, str):
        name = unicodedata.normalize("NFC", given)
        if _DATASET.fullmatch(name) and not name.startswith("_"):
            return name
    raise InvalidRequest(
        f"the dataset's name must be {_RULE}", errors=[FieldError("dataset", f"must be {_RULE}")]
    )


def is_tenant(name: str) -> bool:
    """Whether this can name a tenant's folder."""
    return _TENANT.fullmatch(name) is not None


def is_digest(text: str) -> bool:
    """Whether this is a blake3 digest in hex."""
    return _DIGEST.fullmatch(text) is not None


def new_id() -> str:
    """A new random id: 32 hex digits."""
    return uuid.uuid4().hex
