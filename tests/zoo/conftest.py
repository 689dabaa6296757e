"""timm imports torchvision, whose wheels on PyPI are built for CUDA: beside the CPU build of torch their operators do not
load, and importing the Python part fails for want of their schemas, which is all that it needs."""

from __future__ import annotations

import torch

_SCHEMAS = ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",)
_SCHEMAS += ("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",)
_library = torch.library.Library("torchvision", "FRAGMENT")
if torch.version.cuda is None:
    for schema in _SCHEMAS:
        _library.define(schema)
