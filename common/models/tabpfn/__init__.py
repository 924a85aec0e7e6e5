"""TabPFN: fits by the unmodified library, contexts without pickle, predicts on one shared module.

What tabpfn reads from its surroundings is fixed here, before a module of this package imports it.
"""

from common.models.tabpfn import environment

environment.fix()
