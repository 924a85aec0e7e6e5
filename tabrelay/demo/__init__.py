"""`tabrelay demo`: the whole service at work on four tables."""

from tabrelay.demo.run import run_demo

__all__ = ["run_demo"]
