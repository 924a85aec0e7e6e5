"""The catalogue as one object; its parts are jobs and their events, datasets, workers and speed."""

from __future__ import annotations

from common import logs
from common.catalogue.connection import Client, Scripts, connect
from common.catalogue.datasets import Datasets
from common.catalogue.epoch import Epoch
from common.catalogue.events import Events
from common.catalogue.jobs import Jobs
from common.catalogue.speed import Speed
from common.catalogue.workers import Workers
from common.errors import CatalogueEmptied, CatalogueUnavailable
from common.settings import Settings

log = logs.get("catalogue")


class Catalogue:
    """Jobs, datasets and workers of one deployment, and the epoch that ties them to the data folder."""

    def __init__(self, client: Client, settings: Settings) -> None:
        scripts = Scripts(client, settings.redis_prefix)
        self.client = client
        self.prefix = settings.redis_prefix
        self.epoch = Epoch(client, settings.redis_prefix, settings.data)
        self.jobs = Jobs(client, scripts, settings, self.epoch)
        self.datasets = Datasets(client, scripts, settings.redis_prefix)
        self.workers = Workers(client, settings)
        self.events = Events(client, settings.redis_prefix)
        self.speed = Speed(client, scripts, settings.redis_prefix)

    @classmethod
    def connect(cls, settings: Settings) -> Catalogue:
        """The catalogue at `settings.redis_url`."""
        return cls(connect(settings.redis_url), settings)

    def ping(self) -> None:
        """Raise CatalogueUnavailable when Redis does not answer, CatalogueEmptied when it lost what it knew."""
        self.epoch.require()


def check_in(catalogue: Catalogue) -> bool:
    """At a service's start: begin the epoch of an empty folder, or say that catalogue and folder differ.

    Returns whether they belong together; neither that nor an unreachable Redis keeps a service from starting.
    """
    try:
        matches = catalogue.epoch.ensure()
    except (CatalogueUnavailable, OSError) as error:
        log.warning("the catalogue's epoch can't be compared yet", error=str(error))
        return False
    if not matches:
        log.warning(str(CatalogueEmptied()))
    return matches
