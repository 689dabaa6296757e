"""What the ranks of a node share, and that every one has as much of it as the others."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from ssd_fx import Config
from ssd_fx.backend import machine_of, plan_options
from ssd_fx.ranks import Ranks, dealt, in_a_directory, on_a_drive

CPU = torch.device("cpu")
VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, count: int, nodes: int = 1, node: int = 0) -> None:
    """The environment as torchrun makes it."""
    values = (rank, count, node * count + rank, nodes * count)
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("dirs", "count", "hands"),
    [
        ("ab", 4, ["a", "b", "a", "b"]),
        ("abcd", 2, ["ac", "bd"]),
        ("abc", 2, ["abc", "abc"]),
        ("abcd", 6, ["ac", "bd", "ac", "bd", "ac", "bd"]),
        ("a", 3, ["a", "a", "a"]),
        ("ab", 1, ["ab"]),
    ],
)
def test_directories_are_dealt_out(dirs: str, count: int, hands: list[str]) -> None:
    assert ["".join(dealt(tuple(dirs), Ranks(rank, count))) for rank in range(count)] == hands


@pytest.mark.parametrize(("number", "count"), [*itertools.product(range(1, 9), range(1, 9))])
def test_every_rank_has_the_same_share(number: int, count: int) -> None:
    dirs = tuple(map(str, range(number)))
    hands = [dealt(dirs, Ranks(rank, count)) for rank in range(count)]
    assert len({len(hand) for hand in hands}) == 1
    users = Counter(itertools.chain(*hands))
    assert set(users) == set(dirs)
    assert set(users.values()) == {in_a_directory(dirs, Ranks(0, count))}
    for rank in range(count):  # a share is directories over ranks that meet there: that of the whole node
        own = on_a_drive(dirs, Ranks(rank, count), str)
        assert len(hands[rank]) * count == number * own


def test_directories_of_one_drive_share_its_bandwidth() -> None:
    drives = {"a": 1, "b": 1, "c": 2, "d": 2}
    assert [on_a_drive("abcd", Ranks(rank, 4), drives.get) for rank in range(4)] == [2, 2, 2, 2]
    assert [on_a_drive("ab", Ranks(rank, 2), drives.get) for rank in range(2)] == [2, 2]
    assert [on_a_drive("ac", Ranks(rank, 2), drives.get) for rank in range(2)] == [1, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_share_of_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int) -> None:
    """Drives, their limit and host memory are the node's; the budget is of the device, which a rank has alone."""
    launched(monkeypatch, rank, 2)
    dirs = [str(tmp_path / name) for name in "ab"]
    for path in dirs:
        Path(path).mkdir()
    said = {"dirs": dirs, "host_budget": 1001, "disk_limit": 700, "budget": "400B"}
    config = Config.make(said | {"machine": {"write_bw": 8e9, "read_bw": 6e9, "flops": 1e12}})
    sent = json.loads(config.runtime_json())
    assert (sent["dirs"], sent["host_budget"], sent["disk_limit"]) == ([dirs[rank]], 500, 700)
    assert sent["budget"] == 400
    assert plan_options(config, CPU).host_budget == 500
    machine = machine_of(config, CPU)  # both directories are on one drive
    assert (machine.write_bw, machine.read_bw, machine.flops) == (4e9, 3e9, 1e12)
    assert config.share() == (
        f"rank {rank} of 2 on this node: writes to {dirs[rank]}, whose bandwidth 2 ranks share; "
        "host_budget 500 B, disk_limit 700 B"
    )


def test_ranks_in_one_directory_share_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched(monkeypatch, 2, 3)
    assert Config.make({"dirs": [tmp_path], "disk_limit": 700}).own_disk_limit == 233
    assert Config.make({"dirs": [tmp_path], "disk_limit": 2}).own_disk_limit == 1  # 0 would be no limit
    assert Config.make({"dirs": [tmp_path]}).own_disk_limit == 0
    assert Config.make({"dirs": [tmp_path], "drive_tbw": 1200}).own_drive_tbw == 400


def test_a_process_of_its_own_has_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    alone = Config.make({"dirs": [tmp_path], "host_budget": 10})
    launched(monkeypatch, 1, 2)
    told = Config.make({"dirs": [tmp_path], "host_budget": 10, "ranks": 1})
    assert alone.runtime_json() == told.runtime_json()
    assert (alone.sharing(), told.sharing(), told.own_host_budget, told.share()) == (1, 1, 10, "")


def test_ranks_that_are_said_need_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a scheduler that sets how many processes there are, and not which one this is."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert Config.make({"dirs": [tmp_path], "ranks": 1}).ranks == Ranks()
    monkeypatch.setenv("SSD_FX_RANKS", "1")
    assert Config.make({"dirs": [tmp_path]}).ranks == Ranks()


def test_ranks_dump_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All nodes may see one directory, so it is the number among all ranks that tells them apart."""
    launched(monkeypatch, 1, 2, nodes=2, node=1)
    assert Config.make({"dump": tmp_path}).own_dump == f"{tmp_path}/rank3"
    launched(monkeypatch, 0, 1, nodes=2, node=1)
    assert Config.make({"dump": tmp_path}).own_dump == f"{tmp_path}/rank1"
    launched(monkeypatch, 0, 1)
    assert Config.make({"dump": tmp_path}).own_dump == str(tmp_path)
    assert Config.make({}).own_dump == ""


def test_a_number_of_ranks_may_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """For launchers that set LOCAL_RANK alone."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert Config.make({"ranks": 4}).ranks.count == 4
    assert Config.make({"ranks": "4"}).ranks.rank == 3
    assert Config.make({}).ranks.count == 1
    with pytest.raises(ValueError, match=r"option ranks=2: LOCAL_RANK is 3 in the environment, and right among 2"):
        Config.make({"ranks": 2})
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match=r"option ranks=4: LOCAL_RANK is unset in the environment"):
        Config.make({"ranks": 4})
    with pytest.raises(ValueError, match=r"option ranks=0: '0' is no number of processes"):
        Config.make({"ranks": 0})
    with pytest.raises(ValueError, match=r"option ranks='all': 'all' is no number of processes"):
        Config.make({"ranks": "all"})
