"""What microbatching would do to the requests of a log: they are scheduled without a model, and audited.

``requests`` reads logs, ``steps`` schedules them with the embedded engine's scheduler. Nothing here needs
torch.
"""
