"""The context file, format 1: written once, named by its digest, mapped wherever it is read."""
