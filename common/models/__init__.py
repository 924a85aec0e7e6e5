"""Served foundation models: registry, weights and one adapter a family."""
