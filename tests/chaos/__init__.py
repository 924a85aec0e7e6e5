"""Clients, a nemesis that breaks things under them, and a checker that reads everything afterwards.

`CHAOS_SEED` and `CHAOS_SECONDS` choose the run; `make chaos MINUTES=30` runs a long one.
"""
