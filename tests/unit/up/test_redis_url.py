"""Redis URLs as redis-py and Celery spell them."""

from __future__ import annotations

import pytest

from common.redis_url import celery_url, unix_url, without_password


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("unix://:pw@/run/redis.sock?db=0", "redis+socket://:pw@/run/redis.sock?virtual_host=0"),
        ("unix:///run/redis.sock", "redis+socket:///run/redis.sock?virtual_host=0"),
        ("unix://me:p%40w@/a%20b%3B.sock?db=3", "redis+socket://me:p%40w@/a%20b%3B.sock?virtual_host=3"),
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:pw@redis", "redis://:pw@redis/0"),
        ("redis://redis:6379?db=2&socket_timeout=5", "redis://redis:6379/2"),
        ("rediss://:pw@redis:6380/1", "rediss://:pw@redis:6380/1?ssl_cert_reqs=required"),
        (
            "rediss://redis/1?ssl_cert_reqs=none&ssl_ca_certs=%2Fca.pem",
            "rediss://redis/1?ssl_cert_reqs=none&ssl_ca_certs=%2Fca.pem",
        ),
    ],
)
def test_celery_gets_the_same_server_and_database(url: str, expected: str) -> None:
    assert celery_url(url) == expected


def test_url_of_another_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="not http://"):
        celery_url("http://redis:6379/0")


def test_unix_url_survives_odd_paths_and_passwords() -> None:
    assert unix_url("/a b;?.sock", "p@/w", 1) == "unix://:p%40%2Fw@/a%20b%3B%3F.sock?db=1"


def test_password_is_not_shown() -> None:
    assert without_password("redis://me:pw@host:1/0") == "redis://me:***@host:1/0"
    assert without_password("redis://host:1/0") == "redis://host:1/0"
    assert "pw" not in without_password("unix://:pw@/run/redis.sock?db=0")
