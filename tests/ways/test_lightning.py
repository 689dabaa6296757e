"""Lightning: the inner net is compiled, in `configure_model`; a whole module that logs is not to be compiled."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.bitwise import Compile
from tests.loops.loops import Net, assert_no_bit_changes, batch, parameters
from tests.ways.ways import installed

pytestmark = pytest.mark.slow
lightning = installed("lightning")


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Logs its loss within `training_step`."""

    def __init__(self, compile: Compile | None = None) -> None:
        super().__init__()
        self.net: nn.Module = Net()
        self.how, self.losses = compile, list[Tensor]()

    def configure_model(self) -> None:
        if self.how is not None:
            self.net.compile(**self.how.keywords)  # type: ignore[attr-defined]

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.net(batch[0])
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: Any) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.cat([batch(step) for step in range(3)])), batch_size=64))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_inner_net(tmp_path: Path, inner: str) -> None:
    def loop(compile: Compile) -> list[Tensor]:
        module = Module(compile)
        fit(module)
        assert len(module.losses) == 3
        return [*module.losses, *parameters(module)]

    assert_no_bit_changes(loop, tmp_path, inner, section="ways of working", plain=inner)


@pytest.mark.parametrize("backend", ["aot_eager", "ssd_fx"])
def test_a_whole_module_that_logs_fails_under_every_backend(tmp_path: Path, backend: str) -> None:
    """When this fails docs/trainers.md can drop its advice."""
    options = {"dirs": [str(tmp_path)], "inner": "aot_eager"} if backend == "ssd_fx" else None
    compile = partial(torch.compile, backend=backend, options=options)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"self\.log"):
        fit(compile(Module()))
