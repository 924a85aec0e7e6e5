"""The catalogue as one object; its parts are jobs and their events, datasets, workers and speed."""

from __future__ import annotations

from common.catalogue.connection import Client, Scripts, connect
from common.catalogue.datasets import Datasets
from common.catalogue.events import Events
from common.catalogue.jobs import Jobs
from common.catalogue.speed import Speed
from common.catalogue.workers import Workers
from common.settings import Settings


class Catalogue:
    """Jobs, datasets and workers of one deployment."""

    def __init__(self, client: Client, settings: Settings) -> None:
        scripts = Scripts(client, settings.redis_prefix)
        self.client = client
        self.prefix = settings.redis_prefix
        self.jobs = Jobs(client, scripts, settings)
        self.datasets = Datasets(client, scripts, settings.redis_prefix)
        self.workers = Workers(client, settings)
        self.events = Events(client, settings.redis_prefix)
        self.speed = Speed(client, scripts, settings.redis_prefix)

    @classmethod
    def connect(cls, settings: Settings) -> Catalogue:
        """The catalogue at `settings.redis_url`."""
        return cls(connect(settings.redis_url), settings)

    def ping(self) -> None:
        """Raise CatalogueUnavailable when Redis does not answer."""
        self.client.ping()
