"""Shares and exponents of compile times."""

from __future__ import annotations

import expecttest
import pytest
from growth import FIRST_CUT, FURTHER_CUTS, ORDER, PLANNING, Compiled, exponent, table, verdict


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_the_exponent_of_a_power_is_that_power(power: float) -> None:
    sizes = [795, 1539, 3027, 6003]
    assert exponent(sizes, [3e-4 * n**power for n in sizes]) == pytest.approx(power)


def test_the_exponent_is_fitted_to_all_sizes() -> None:
    """Doubling, then eight times as much: 1 and 3, and 2 over all."""
    assert exponent([1, 2, 4], [1, 2, 16]) == pytest.approx(2.0)


@pytest.mark.parametrize(("sizes", "seconds"), [([5], [1.0]), ([5, 5], [1.0, 2.0]), ([5, 6], [0.0, 1.0])])
def test_what_has_no_growth(sizes: list[float], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="no growth can be fitted"):
        exponent(sizes, seconds)


def compiled(layers: int, scale: float, compile_s: float) -> Compiled:
    """Everything linear but `verify`, which is quadratic; a busy machine doubles what the wall clock shows."""
    cpu = {
        FIRST_CUT: 0.3 * scale,
        FURTHER_CUTS: 0.2 * scale,
        "alias": 0.02 * scale,
        "verify": 0.01 * scale**2,
        "select": 1e-5,
    }
    cpu |= {PLANNING: 0.6 * scale + 0.01 * scale**2, ORDER: 0.1 * scale}
    return Compiled(layers, int(800 * scale), 100, compile_s, {name: 2 * each for name, each in cpu.items()}, cpu)


def test_shares() -> None:
    run = compiled(6, 1, 20.0)
    assert run.share == pytest.approx(2 * (0.61 + 0.1) / 20)
    assert run.added_share == pytest.approx(2 * (0.31 + 0.1) / 20)
    assert run.uncut_share == pytest.approx(2 * (0.11 + 0.1) / 20)


class TestText(expecttest.TestCase):
    runs = (compiled(6, 1, 20.0), compiled(12, 2, 30.0), compiled(24, 4, 50.0))

    def test_table(self) -> None:
        self.assertExpectedInline(
            table(self.runs),
            """\
ms                        6 layers  12 layers  24 layers  6>12  12>24
nodes of the joint graph       800       1600       3200
alias groups                   100        100        100
first cut (torch)            600.0     1200.0     2400.0  1.00   1.00
further cuts (torch)         400.0      800.0     1600.0  1.00   1.00
alias                         40.0       80.0      160.0  1.00   1.00
verify                        20.0       80.0      320.0  2.00   2.00
select                         0.0        0.0        0.0     -      -
rest                         160.0      320.0      640.0  1.00   1.00
order                        200.0      400.0      800.0  1.00   1.00
partition and planning      1420.0     2880.0     5920.0  1.02   1.04
whole compilation          20000.0    30000.0    50000.0
share of the compilation      7.1%       9.6%      11.8%
  without the first cut       4.1%       5.6%       7.0%
  without any cut             2.1%       2.9%       3.8%""",
        )

    def test_verdict(self) -> None:
        self.assertExpectedInline(
            verdict(self.runs),
            """\
24 layers: ssd_fx adds 7.0% of the compile time, under 10%
with the cut that plain Inductor makes too, it is 11.8%
they grow with the nodes to the power of 1.03""",
        )

    def test_verdict_of_one(self) -> None:
        self.assertExpectedInline(
            verdict([compiled(6, 1, 10.0)]),
            """\
6 layers: ssd_fx adds 8.2% of the compile time, under 10%
with the cut that plain Inductor makes too, it is 14.2%""",
        )
