"""What a fit child keeps between jobs; importing this loads torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from common.catalogue import Catalogue
from common.catalogue.recordfile import RecordFile
from common.contexts.store import ContextStore
from common.files import DataFolder
from common.models.protocol import Adapter, Backbone
from common.models.registry import Registry, load_adapter
from common.relay.client import WorkerConnections
from common.settings import Settings
from common.tables.child import ParserChild


@dataclass
class Worker:
    """What a fit child keeps between jobs."""

    settings: Settings
    name: str
    catalogue: Catalogue
    registry: Registry
    store: ContextStore
    folder: DataFolder
    records: RecordFile
    parser: ParserChild
    connections: WorkerConnections = field(default_factory=WorkerConnections)
    backbones: dict[tuple[str, str], tuple[Adapter, Backbone]] = field(default_factory=dict)

    def backbone(self, model: str, task: str) -> tuple[Adapter, Backbone]:
        """Adapter and weights, loaded once; raises ModelNotReady."""
        key = model, task
        weights = self.registry.weights(model, task)
        found = self.backbones.get(key)
        if found is None or found[1].weights.digest != weights.digest:
            adapter = load_adapter(self.registry.spec(model))
            found = self.backbones[key] = adapter, adapter.load(weights, self.settings.device)
        return found

    @classmethod
    def start(cls, settings: Settings, name: str) -> Worker:
        """A worker with its own connections; the first backbone is loaded when it is needed."""
        torch.set_num_threads(settings.threads)
        return cls(
            settings=settings,
            name=name,
            catalogue=Catalogue.connect(settings),
            registry=Registry(settings),
            store=ContextStore(settings),
            folder=DataFolder(settings),
            records=RecordFile(settings.data),
            parser=ParserChild(settings.parser_memory_bytes, settings.parser_timeout_s, settings.parser_uses),
        )
