"""The engine's tests need torch, but little of it: more threads would only wait for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
