"""timm imports torchvision, whose wheels on PyPI are built for CUDA: their operators do not load beside a CPU torch.

Importing the Python part, which is all that timm needs, fails for want of their schemas.
"""

from __future__ import annotations

import torch

_SCHEMAS = ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",)
_SCHEMAS += ("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",)
_library = torch.library.Library("torchvision", "FRAGMENT")
if torch.version.cuda is None:
    for schema in _SCHEMAS:
        _library.define(schema)
