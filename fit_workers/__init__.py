"""Fit workers: Celery wakes them, the catalogue says what to fit; one process a device, torch only in the child."""
