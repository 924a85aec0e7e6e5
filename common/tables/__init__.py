"""Tables: reading untrusted files, the schema that turns rows into features, the target, the canonical copy."""
