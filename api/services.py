"""What the routes call, put together once a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from celery import Celery
from flask import current_app

from common import logs
from common.admission import UploadRoom
from common.catalogue import Catalogue, check_in
from common.files import DataFolder
from common.models.protocol import Prediction
from common.models.registry import Registry
from common.relay.one_shot import OneShotRelay
from common.relay.relay import Relay
from common.relay.snapshot import RoutingSnapshot
from common.relay.wire import Answer, encode_rows
from common.service.datasets import DatasetService
from common.service.fits import FitService
from common.service.one_shots import OneShotService
from common.service.predicts import PredictService
from common.service.refits import RefitService
from common.settings import Settings
from common.tables.child import ParserChild
from common.tables.json_reader import table_from_json
from common.wake import TASK, celery_config

log = logs.get("api")

#: Seconds between two tries to send a wake-up; the janitor sends the ones that were not.
WAKE_RETRY = {"max_retries": 2, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.2}


@dataclass(frozen=True)
class Services:
    """Everything that an API process holds."""

    settings: Settings
    catalogue: Catalogue
    registry: Registry
    parser: ParserChild
    snapshot: RoutingSnapshot
    folder: DataFolder
    fits: FitService
    refits: RefitService
    predicts: PredictService
    one_shots: OneShotService
    uploads: UploadRoom
    datasets: DatasetService

    @classmethod
    def build(cls, settings: Settings) -> Services:
        """Connect and start what runs beside the requests: the snapshot's thread and the parser child."""
        catalogue = Catalogue.connect(settings)
        registry = Registry(settings)
        parser = ParserChild(settings.parser_memory_bytes, settings.parser_timeout_s, settings.parser_uses)
        snapshot = RoutingSnapshot(catalogue, settings)
        celery = Celery("tabrelay-api")
        celery.conf.update(celery_config(settings))

        def wake(queue: str) -> None:
            try:
                celery.send_task(
                    TASK, args=(queue,), queue=queue, ignore_result=True, retry_policy=WAKE_RETRY
                )
            except Exception as error:  # kombu raises what its transport raises; the job is already accepted
                log.warning("a wake-up was not sent; the janitor will", queue=queue, error=str(error))

        refits = RefitService(catalogue, registry, settings, wake)
        check_in(catalogue)
        warm_up()
        snapshot.start()
        parser.start()
        return cls(
            settings=settings,
            catalogue=catalogue,
            registry=registry,
            parser=parser,
            snapshot=snapshot,
            folder=DataFolder(settings),
            fits=FitService(catalogue, registry, parser, settings, wake),
            refits=refits,
            predicts=PredictService(snapshot, Relay(snapshot), refits, registry, settings),
            one_shots=OneShotService(OneShotRelay(snapshot), catalogue, registry, settings, wake),
            uploads=UploadRoom(settings.max_upload_bytes_in_flight),
            datasets=DatasetService(catalogue, settings),
        )

    def close(self) -> None:
        """End what runs beside the requests."""
        self.snapshot.stop()
        self.predicts.close()
        self.one_shots.close()
        self.parser.close()


def warm_up() -> None:
    """Go through Arrow once: its first use loads pandas, half a second that no predict should wait for."""
    encode_rows(table_from_json({"columns": ["a"], "rows": [[1.0]]}))
    answer = Answer(Prediction(probabilities=np.ones((1, 1))), context="", worker="", target={})
    Answer.decode(answer.encode())


def services() -> Services:
    """The services of the running application."""
    return cast(Services, current_app.extensions["tabrelay"])
