"""What may be said as an option, and what one hears when it is wrong."""

from __future__ import annotations

import json
import tempfile
from collections import UserList
from pathlib import Path

import numpy as np
import pytest

from ssd_fx import Config


def test_defaults_are_documented_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/")
    monkeypatch.delenv("SSD_FX_BUDGET")
    config = Config.make()
    assert (config.budget, config.min_bytes, config.engine, config.inner) == ("auto", 2**20, "auto", "inductor")
    assert (config.inflight, config.prefetch, config.dump) == ("auto", 64 * 2**20, "")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        *[("2GiB", 2 << 30), ("512MB", 512_000_000), ("4096B", 4096), ("0", 0), (0, 0), (1 << 20, 1 << 20)],
        *[("1.5G", 3 << 29), ("2g", 2 << 30), ("512M", 512 << 20), ("64k", 65536), ("1T", 1 << 40)],
        *[(0.25, 0.25), ("0.25", 0.25), ("25%", 0.25), (1.0, 1.0), ("100%", 1.0)],
    ],
)
def test_budgets(said: object, meant: float) -> None:
    budget = Config.make({"budget": said}).budget
    assert budget == meant
    assert type(budget) is type(meant)


@pytest.mark.parametrize(
    ("said", "meant"), [("24GiB", 24 << 30), ("90%", 0.9), (0.5, 0.5), ("auto", "auto"), (1 << 20, 1 << 20)]
)
def test_limits_of_memory(said: object, meant: object) -> None:
    config = Config.make({"memory": said})
    assert (config.memory, config.budget) == (meant, 0)
    assert json.loads(config.runtime_json())["memory"] == meant


def test_what_is_said_in_the_call_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_FX_BUDGET", "0.5")
    assert Config.make({"memory": "auto"}).budget == 0
    monkeypatch.setenv("SSD_FX_MEMORY", "auto")
    with pytest.raises(ValueError, match=r"memory='auto' and budget=0\.5 are two answers"):
        Config.make()
    found = Config.make({"budget": 0.25})
    assert (found.memory, found.budget) == ("", 0.25)
    assert "memory" not in json.loads(found.runtime_json())


def test_a_graph_has_one_name_on_all_ranks_and_wherever_its_bytes_go(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Config.make({"dirs": ["/"]})
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Config.make({"dirs": ["/", "/tmp"], "drive_tbw": 1, "ranks": 2}).digest() == first.digest()
    assert Config.make({"dirs": ["/"], "compression": "bitpack"}).digest() != first.digest()


HUGE = "9" * 400  # digits: beyond any float

BAD = [
    ({"budget": "lots"}, r"budget='lots' is not a budget; right would be a size such as '2GiB', a share"),
    ({"budget": 1.5}, r"budget=1.5 is not a budget; .*, or 'auto'$"),
    ({"budget": 2.5e9}, r"budget=2500000000\.0 is not a budget; .*; as bytes it would be 2500000000$"),
    ({"budget": "150%"}, r"budget='150%' is not a budget"),
    ({"budget": -1}, r"budget=-1 is not a budget"),
    ({"budget": True}, r"budget=True is not a budget"),
    ({"budget": None}, r"budget=None is not a budget"),
    ({"budget": f"{HUGE}.0G"}, r"budget='9+\.0G' is not a budget"),
    ({"min_bytes": f"{HUGE}G"}, r"min_bytes='9+G' is not a size; right would be"),
    ({"slowdown": 5}, r"slowdown=5 is not a share; right would be 0 to 1, such as 0\.05 or '5%'"),
    ({"slowdown": "150%"}, r"slowdown='150%' is not a share"),
    ({"slowdown": -0.1}, r"slowdown=-0\.1 is not a share"),
    ({"memory": "lots"}, r"memory='lots' is no limit of memory; right would be a size such as '24GiB', a share of the"),
    ({"memory": 24}, r"memory=24 is no limit of memory"),
    ({"memory": 0}, r"memory=0 is no limit of memory"),
    ({"memory": "120%"}, r"memory='120%' is no limit of memory"),
    ({"memory": True}, r"memory=True is no limit of memory"),
    ({"memory": "24GiB", "budget": 0}, r"memory=25769803776 and budget=0 are two answers to one question; right would"),
    ({"min_bytes": "1 parsec"}, r"min_bytes='1 parsec' is not a size; right would be"),
    ({"drive_tbw": "much"}, r"drive_tbw='much' is no number of TB; right would be e\.g\. 600, or 0 if not known"),
    ({"drive_tbw": -1}, r"drive_tbw=-1 is no number of TB"),
    ({"drive_tbw": True}, r"drive_tbw=True is no number of TB"),
    ({"drive_tbw": [600]}, r"drive_tbw=\[600\] is no number of TB"),
    ({"drive_tbw": "nan"}, r"drive_tbw='nan' is no number of TB"),
    ({"engine": "floppy"}, r"engine='floppy' is unknown; right would be one of 'auto', 'kvikio', 'kvikio-forced'"),
    ({"inner": "eager"}, r"inner='eager' is unknown; right would be one of 'aot_eager', 'inductor'"),
    ({"dirs": []}, r"dirs=\[\] is not a list of directories; right would be e\.g\."),
    ({"dirs": 3}, r"dirs=3 is not a list of directories"),
    ({"dump": 3}, r"dump=3 is not a path"),
    ({"allow_tmpfs": "maybe"}, r"allow_tmpfs='maybe' is neither true nor false"),
    ({"checksums": ""}, r"checksums='' is neither true nor false"),
    (
        {"machine": "fast"},
        r"machine='fast' is no machine \(Expecting value: line 1 .*\); right would be 'auto', 'default' or rates",
    ),
    ({"machine": 7}, r"machine=7 is no machine \(no dictionary of rates\)"),
    ({"machine": {"flop": 1}}, r"is no machine \(a machine has no 'flop'; right would be any of flops, memory_bw"),
    ({"machine": {"flops": "fast"}}, r"is no machine \(flops='fast' is no rate; right would be a number > 0"),
    ({"machine": {"flops": int(HUGE)}}, r"is no machine \(flops=9+ is no rate; right would be a number > 0"),
    ({"profile": "step.json"}, r"no option 'profile'\. The options are: dirs, memory, budget"),
    ({"bugdet": 1}, r"no option 'bugdet'; did you mean 'budget'\? The options are: dirs, memory, budget, slowdown"),
    (
        {"max_autotune": True},
        r"no option 'max_autotune'; it is one of Inductor's, which torch\._inductor\.config\.max_autotune sets for",
    ),
    ({"triton.cudagraphs": True}, r"which torch\._inductor\.config\.triton\.cudagraphs sets"),
    ({"disk_limit": 0}, r"disk_limit=0 lets nothing be written; without the option there is no limit"),
    ({"dirs": {"/a": 1}}, r"dirs=\{'/a': 1\} is not a list of directories"),
    ({"dirs": b"/a"}, r"dirs=b'/a' is not a list of directories"),
    ({"keep": {"head"}}, r"keep=\{'head'\} is no list of module name patterns; right would be e\.g\."),
    ({"offload": 3}, r"offload=3 is no list of module name patterns"),
    ({"offload": [3]}, r"offload=\[3\] is no list of module name patterns"),
    ({"offload": None}, r"offload=None is no list of module name patterns"),
    ({"min_bytes": np.int64(-1)}, r"min_bytes=.*-1.* is not a size"),
    ({"budget": np.float32(1.5)}, r"budget=.*1\.5.* is not a budget"),
    ({"zzz": 1}, r"no option 'zzz'\. The options are: dirs, memory, budget"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(o)[:60] for o, _ in BAD])
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.make(options)


def test_numbers_of_numpy_are_numbers() -> None:
    config = Config.make({"min_bytes": np.int64(0), "budget": np.float32(0.25), "host_budget": np.int32(5)})
    found = (config.min_bytes, config.budget, config.host_budget)
    assert found == (0, 0.25, 5)
    assert [type(each) for each in found] == [int, float, int]
    assert json.loads(Config.make({"budget": np.int64(1 << 20)}).runtime_json())["budget"] == 1 << 20


@pytest.mark.parametrize("said", ["head, blocks.*", ["head", "blocks.*"], " head , head,blocks.*"])
def test_lists_of_patterns(said: object, monkeypatch: pytest.MonkeyPatch) -> None:
    meant = ("head", "blocks.*")
    config = Config.make({"keep": said, "offload": said})
    assert (config.keep, config.offload) == (meant, meant)
    assert Config.make({"keep": "", "offload": ()}).keep == ()
    monkeypatch.setenv("SSD_FX_KEEP", "head, blocks.*")
    assert Config.make().keep == meant


def test_any_sequence_is_a_list() -> None:
    """As OmegaConf's ListConfig, which is no list."""
    config = Config.make({"dirs": UserList(["/a", "/b"]), "keep": UserList(["head"])})
    assert (config.dirs, config.keep) == (("/a", "/b"), ("head",))


def test_the_environment_is_read_and_options_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSD_FX_BUDGET", "1GiB")
    monkeypatch.setenv("SSD_FX_DIRS", f"{tmp_path}:/elsewhere")
    assert Config.make().budget == 1 << 30
    assert Config.make().dirs == (str(tmp_path), "/elsewhere")
    assert Config.make({"budget": 0.5}).budget == 0.5
    monkeypatch.setenv("SSD_FX_BUDGET", "lots")
    with pytest.raises(ValueError, match=r"^SSD_FX_BUDGET in the environment: option budget='lots' is not a budget"):
        Config.make()


def test_an_empty_variable_turns_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves one behind where its own variable is not set."""
    for name in ("checksums", "adapt", "recompute", "cpu_allocator"):
        with monkeypatch.context() as patch:
            patch.setenv(f"SSD_FX_{name.upper()}", "")
            with pytest.raises(ValueError, match=f"in the environment: option {name}='' is neither true nor false"):
                Config.make()


def test_relative_directories_survive_a_chdir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config.make({"dirs": "spill"}).dirs == (str(tmp_path / "spill"),)


def test_directories_that_are_said_need_no_temporary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert Config.make({"dirs": "/a"}).dirs == ("/a",)


def test_a_colon_divides_text_and_no_path() -> None:
    assert Config.make({"dirs": "/a:/b"}).dirs == ("/a", "/b")
    assert Config.make({"dirs": Path("/a:b")}).dirs == ("/a:b",)


def test_a_directory_that_is_named_twice_is_one(tmp_path: Path) -> None:
    """Else a process has two files there, and `disk_limit` holds for each."""
    one, two, link = tmp_path / "one", tmp_path / "two", tmp_path / "link"
    one.mkdir()
    two.mkdir()
    link.symlink_to(one)
    assert Config.make({"dirs": [one, two, f"{one}/", link]}).dirs == (str(one), str(two))
    assert Config.make({"dirs": [link, one]}).dirs == (str(link),)


def test_the_runtime_half_is_canonical() -> None:
    a = Config.make({"dirs": "/a", "budget": 0.1, "engine": "memory"}).runtime_json()
    b = Config.make({"engine": "memory", "dirs": ["/a"], "budget": 0.2}).runtime_json()
    assert a == b
    assert json.loads(a)["dirs"] == ["/a"]


@pytest.mark.parametrize("said", ["fp8", {"ssd": "fp8"}, "ssd=fp8"])
def test_one_codec_is_that_of_the_disk(said: object) -> None:
    assert Config.make({"compression": said}).compression == (("ssd", "fp8"),)


def test_a_codec_per_tier() -> None:
    config = Config.make({"compression": "host=bitpack, ssd=int8"})
    assert config.compression == (("host", "bitpack"), ("ssd", "int8"))
    assert json.loads(config.runtime_json())["compression"] == {"host": "bitpack", "ssd": "int8"}


@pytest.mark.parametrize("said", ["zip", "tape=fp8", "fp8,int8", "ssd=fp8,int8", {"ssd": "zip"}, {"ssd": ["fp8"]}, 7])
def test_what_is_no_compression(said: object) -> None:
    with pytest.raises(ValueError, match="is no compression; right would be one of 'bitpack', 'fp8', 'int8', or one"):
        Config.make({"compression": said})


def test_bytes_are_the_budget_of_the_process() -> None:
    assert json.loads(Config.make({"budget": "1KiB"}).runtime_json())["budget"] == 1024
    assert json.loads(Config.make({"budget": 0.5}).runtime_json())["budget"] == 0


def test_the_variable_that_lets_any_torch_through_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_FX_ANY_TORCH", "1")
    Config.make({})


def test_an_unknown_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_FX_BUGDET", "1GiB")
    with pytest.raises(ValueError, match=r"has SSD_FX_BUGDET, and ssd_fx has no such option; did you mean 'budget'\?"):
        Config.make()


@pytest.mark.parametrize("variable", ["SSD_FX_Budget", "ssd_fx_budget", "SSD_FX_budget"])
def test_a_variable_that_is_not_in_capitals(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be read by nobody."""
    monkeypatch.setenv(variable, "0.25")
    right = f"^the environment has {variable}, which is not in capitals; right would be SSD_FX_BUDGET$"
    with pytest.raises(ValueError, match=right):
        Config.make()


def test_a_variable_of_somebody_else_in_small_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is called like an option can be meant as one."""
    monkeypatch.setenv("ssd_fx_scratch", "/mnt")
    Config.make()


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (100, "'100MiB', '100GiB', or '100B' if bytes are meant, or '100%'"),
        ("512", "'512MiB', '512GiB', or '512B' if bytes are meant, or a share such as '25%'"),
        (1, r"'1MiB', '1GiB', or '1B' if bytes are meant, or 1\.0 to keep everything"),
    ],
)
def test_a_small_budget_without_a_unit(said: object, right: str) -> None:
    """100 may be meant as MiB, as GiB or as percent."""
    with pytest.raises(ValueError, match=rf"budget={said!r} has no unit: of what\? Right would be {right}$"):
        Config.make({"budget": said})


def test_nothing_in_flight() -> None:
    with pytest.raises(ValueError, match="inflight=0 lets nothing be written"):
        Config.make({"inflight": 0})


def test_in_flight_is_a_size_or_left_to_the_device() -> None:
    said = [json.loads(Config.make({"inflight": value}).runtime_json())["inflight"] for value in ("auto", "1GiB")]
    assert said == ["auto", 2**30]
    with pytest.raises(ValueError, match="inflight='much' is not a size"):
        Config.make({"inflight": "much"})


def test_options_that_are_no_dictionary() -> None:
    with pytest.raises(ValueError, match="options='dirs' is no dictionary of options"):
        Config.make("dirs")  # type: ignore[arg-type]


def test_a_machine_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_FX_MACHINE", '{"write_bw": 6e9, "flops": 3e14}')
    assert Config.make().machine == '{"flops": 300000000000000.0, "write_bw": 6000000000.0}'
    assert Config.make({"machine": {"flops": 3e14, "write_bw": 6e9}}).machine == Config.make().machine
    monkeypatch.delenv("SSD_FX_MACHINE")
    assert Config.make().machine == "auto"


def test_home_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    config = Config.make({"dirs": "~/spill", "dump": "~/plan"})
    assert (config.dirs, config.dump) == (("/somewhere/spill",), "/somewhere/plan")
