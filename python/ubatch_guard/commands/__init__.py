"""The commands that read traces and logs: ``audit`` and ``simulate``."""
