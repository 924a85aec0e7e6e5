"""One Redis URL for everything: redis-py's form is the setting, Celery's is made from it."""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit


def unix_url(path: str, password: str, database: int = 0) -> str:
    """redis-py's URL of a server behind a Unix socket."""
    return f"unix://:{quote(password, safe='')}@{quote(path)}?db={database}"


def celery_url(redis_url: str) -> str:
    """The same server and database as Celery and kombu spell them.

    They know a Unix socket only as `redis+socket://`, with the database as `virtual_host`, and want the database
    of a TCP URL in its path. Celery's result backend refuses `rediss://` without `ssl_cert_reqs`; redis-py's own
    default is `required`. Other options of redis-py's URL mean nothing to kombu and are left out.
    """
    parts = urlsplit(redis_url)
    query = dict(parse_qsl(parts.query))
    credentials, at, host = parts.netloc.rpartition("@")
    if parts.scheme == "unix":
        database = query.get("db", "0")
        return f"redis+socket://{credentials}{at}{quote(unquote(parts.path))}?virtual_host={database}"
    if parts.scheme not in ("redis", "rediss"):
        raise ValueError(f"a Redis URL starts with redis://, rediss:// or unix://, not {parts.scheme}://")
    database = query.get("db") or parts.path.strip("/") or "0"
    url = f"{parts.scheme}://{credentials}{at}{host}/{database}"
    if parts.scheme == "redis":
        return url
    tls = {name: value for name, value in query.items() if name.startswith("ssl_")}
    tls.setdefault("ssl_cert_reqs", "required")
    return f"{url}?{urlencode(tls)}"


def without_password(redis_url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(redis_url)
    credentials, at, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    return parts._replace(netloc=f"{user}:***@{host}" if at else host).geturl()
