"""Predict workers: one process a device, answering over HTTP from contexts that fit workers wrote."""
