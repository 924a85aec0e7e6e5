"""How a fit worker is woken: one Celery message a job or one-shot, carrying nothing but the queue's name.

The message only wakes; which job runs is decided by the catalogue's claim script. So a message that is lost,
delivered twice or late changes nothing: the janitor sends a new one, and one that finds no job ends.
Plain values here: the core does not import Celery.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.catalogue import Catalogue
from common.catalogue.jobs import QUEUES
from common.redis_url import celery_url
from common.settings import Settings

#: Name of the one task.
TASK = "tabrelay.wake"
#: The queue whose wake-ups tell of one-shots (common.lane); every fit worker hears it.
LANE = "one-shot"


def unheard(catalogue: Catalogue, queues: Sequence[str]) -> list[str]:
    """The queues with waiting jobs of which no wake-up is on its way."""
    return [
        queue
        for queue in queues
        if catalogue.jobs.waiting(queue) and not catalogue.client.llen(f"{catalogue.prefix}celery:{queue}")
    ]


def celery_config(settings: Settings) -> dict[str, Any]:
    """Celery settings of every process that sends or takes wake-ups."""
    return {
        "broker_url": celery_url(settings.redis_url),
        "broker_transport_options": {
            # One value everywhere: on a shared broker the shortest one wins.
            "visibility_timeout": int(settings.fit_time_limit_s * 1.5),
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            "global_keyprefix": f"{settings.redis_prefix}celery:",
            "socket_timeout": 30,
            "socket_connect_timeout": 2,
            "socket_keepalive": True,
            "health_check_interval": 25,
            "retry_on_timeout": True,
        },
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_ignore_result": True,
        "result_backend": None,
        "task_create_missing_queues": False,
        "task_queues": {name: {"exchange": name, "routing_key": name} for name in (*QUEUES, LANE)},
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "worker_prefetch_multiplier": 1,
        "worker_proc_alive_timeout": 300.0,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_send_task_events": False,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "worker_enable_remote_control": False,
    }
