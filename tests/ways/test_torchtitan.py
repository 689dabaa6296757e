"""torchtitan's own functions: its model, its checkpoints, its blocks compiled one by one, its FSDP2 on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.bitwise import Compile, by_name
from tests.loops.loops import assert_no_bit_changes, seen_in_steps
from tests.ways.ways import assert_two_ranks_agree, installed

pytestmark = pytest.mark.slow
installed("torchtitan")

WORDS, LENGTH = 128, 64
MODES = {"none": "none", "full": "full", "selective by operator": "op", "selective by layer": "2"}


def tokens(seed: int) -> Tensor:
    """int64 [2, LENGTH]."""
    return torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def llama(checkpoint: str, compile: Compile | None) -> torch.nn.Module:
    """Its Llama 3, tiny, in the order of its `parallelize_llama`: checkpoints, then each block compiled."""
    from torchtitan.config.job_config import ActivationCheckpoint
    from torchtitan.config.job_config import Compile as CompileConfig
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra import parallelize

    torch.manual_seed(0)
    shape = TransformerModelArgs(dim=64, n_layers=3, n_heads=4, vocab_size=WORDS, multiple_of=32, max_seq_len=LENGTH)
    model: torch.nn.Module = Transformer(shape)
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))  # type: ignore[operator]
    if checkpoint != "none":
        how = {"mode": "full"} if checkpoint == "full" else {"mode": "selective", "selective_ac_option": checkpoint}
        saved = parallelize._op_sac_save_list
        activation_checkpoint._layer_sac_count = 0
        activation_checkpoint.apply_ac(
            model, ActivationCheckpoint(**how), model_compile_enabled=True, op_sac_save_list=saved
        )
    if compile is not None:
        with by_name(compile) as backend:
            parallelize.apply_compile(model, CompileConfig(enable=True, backend=backend))
    return model


@pytest.fixture(autouse=True)
def lru_cache() -> object:
    """`apply_ac` turns Dynamo's cache of guards off, for good."""
    yield
    torch._C._dynamo.eval_frame._set_lru_cache(True)  # type: ignore[attr-defined]


def test_every_model_has_the_same_checkpoints() -> None:
    """torchtitan counts layers over all models of the process: of three layers it took one, then two."""
    found = [[name for name, _ in llama("2", None).named_modules() if "checkpoint" in name] for _ in range(2)]
    assert found[0] == found[1] != []


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("checkpoint", MODES.values(), ids=MODES)
def test_blocks_compiled_one_by_one(tmp_path: Path, checkpoint: str, inner: str) -> None:
    def loop(compile: Compile) -> list[Tensor]:
        model = llama(checkpoint, compile)
        with by_name(compile):
            return seen_in_steps(
                model, lambda step: F.cross_entropy(model(tokens(step)).flatten(0, 1), tokens(step).flatten())
            )

    assert_no_bit_changes(loop, tmp_path, inner, section="ways of working", plain=inner, share=0.5)


@pytest.mark.parametrize("checkpoint", MODES.values(), ids=MODES)
def test_fsdp2_on_two_ranks(tmp_path: Path, checkpoint: str) -> None:
    steps, parameters = 2, 30
    assert_two_ranks_agree("tests.ways.titan_rank", tmp_path, checkpoint, steps * (1 + parameters))
