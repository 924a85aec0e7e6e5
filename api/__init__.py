"""The HTTP edge: routes, limits, error mapping, OpenAPI. It parses nothing heavy and never loads torch."""
