"""The names of modules, of all forms of expressions that Dynamo has for them."""

from __future__ import annotations

import pytest

from ssd_fx.passes.joint.modules import dotted, name_of


@pytest.mark.parametrize(
    ("path", "root", "name"),
    [
        ("L['self']", "L['self']", ""),
        ("L['self'].blocks.0.attn", "L['self']", "blocks.0.attn"),
        ("L['self'].__dict__['_modules']['blocks'].0.attn", "L['self']", "blocks.0.attn"),
        ("L['self']._modules['blocks']._modules['0'].attn", "L['self']", "blocks.0.attn"),
        ("L['self'].experts['first'].up", "L['self']", "experts.first.up"),
        ("L['models']['first'].up", "L['models']['first']", "up"),
        ("L['self'].__dict__['model'].blocks.0", "L['self'].model", "blocks.0"),
        ("L['self'].model.blocks.0", "L['self'].__dict__['model']", "blocks.0"),
        ("L['self'].__dict__['_modules']['blocks'].0", "G['other']", "blocks.0"),
        ("L['self'].models.0", "L['self'].model", "models.0"),
    ],
)
def test_names(path: str, root: str, name: str) -> None:
    assert name_of(path, (root,)) == name


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("self.__dict__['_modules']['head']._parameters['weight']", "self.head.weight"),
        ("self.__dict__['hidden'][0]", "self.hidden[0]"),
        ("batch['mask']", "batch['mask']"),
    ],
)
def test_what_is_not_registered_keeps_its_form(expression: str, expected: str) -> None:
    assert dotted(expression) == expected
