"""The catalogue: jobs, datasets and versions, references and workers, kept in Redis.

Every change of state is one Lua script of `lua/`, compare-and-set, so that two processes never disagree
about who did what. What the files can't tell (names, versions, pins) is also in the record file.
"""

from common.catalogue.catalogue import Catalogue, check_in
from common.catalogue.records import Dataset, Job, JobState, Phase, Version

__all__ = ["Catalogue", "Dataset", "Job", "JobState", "Phase", "Version", "check_in"]
