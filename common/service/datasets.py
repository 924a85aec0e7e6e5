"""Datasets: list, show, delete, pin."""

from __future__ import annotations

from common.catalogue import Catalogue, Dataset
from common.catalogue.recordfile import RecordFile
from common.errors import DatasetNotFound
from common.files import DataFolder, bury
from common.names import dataset_name
from common.settings import Settings


class DatasetService:
    """Answers about datasets and ends them."""

    def __init__(self, catalogue: Catalogue, settings: Settings) -> None:
        self._catalogue = catalogue
        self._folder = DataFolder(settings)
        self._records = RecordFile(settings.data)

    def get(self, tenant: str, name: str) -> Dataset:
        """A dataset with a published version; raises DatasetNotFound, or CatalogueEmptied for one not restored yet."""
        dataset = self._find(tenant, dataset_name(name))
        if not dataset.current:
            raise DatasetNotFound(f"the dataset {name!r} has no published version yet")
        return dataset

    def page(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[Dataset], str | None]:
        """Datasets with a published version in order of their names, and the name to go on after."""
        found: list[Dataset] = []
        while True:
            names = self._catalogue.datasets.names(tenant, after=after, limit=limit)
            for name in names:
                after = name
                try:
                    found.append(self.get(tenant, name))
                except DatasetNotFound:  # not published yet, or deleted meanwhile
                    continue
                if len(found) == limit:
                    return found, after
            if len(names) < limit:
                if not found:
                    self._catalogue.epoch.require()  # an emptied catalogue is not an empty one
                return found, None

    def delete(self, tenant: str, name: str) -> None:
        """Delete a dataset and its files in every tier; the tombstone is on disk before this returns.

        Raises DatasetNotFound, and CatalogueEmptied while the catalogue does not belong to the data folder.
        """
        name = dataset_name(name)
        self._catalogue.epoch.require()  # or the tombstone would be for a dataset of another catalogue
        self._find(tenant, name)
        self._records.delete(tenant, name)
        self._catalogue.datasets.delete(tenant, name)
        bury(self._folder, self._catalogue, tenant)

    def delete_expired(self, tenant: str, name: str, now_ms: int) -> bool:
        """Delete a dataset whose time is up, unless a publish or a pin came before."""
        with self._folder.locked(tenant):  # publishes hold it too
            try:
                found = self._catalogue.datasets.get(tenant, name)
            except DatasetNotFound:
                return False
            if found.pinned or not 0 < found.expires_ms <= now_ms:
                return False
            self._records.delete(tenant, name)
            self._catalogue.datasets.delete(tenant, name)
        bury(self._folder, self._catalogue, tenant)
        return True

    def _find(self, tenant: str, name: str) -> Dataset:
        try:
            return self._catalogue.datasets.get(tenant, name)
        except DatasetNotFound:
            self._catalogue.epoch.require()
            raise

    def pin(self, tenant: str, name: str, pinned: bool) -> Dataset:
        """Keep every version of a dataset, or no longer."""
        self._catalogue.epoch.require()
        dataset = self.get(tenant, name)
        self._records.pin(tenant, dataset.name, pinned)
        self._catalogue.datasets.pin(tenant, dataset.name, pinned)
        return self.get(tenant, name)
