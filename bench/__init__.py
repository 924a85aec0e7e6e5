"""Measurements; each module is one question, one command, one JSON result."""
