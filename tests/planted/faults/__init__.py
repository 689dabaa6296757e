"""The faults, by the part of the code that they are in."""

from tests.planted.fault import Fault
from tests.planted.faults import alias, engines, graphs, memory, planner, store

FAULTS: tuple[Fault, ...] = (
    *alias.FAULTS,
    *planner.FAULTS,
    *graphs.FAULTS,
    *store.FAULTS,
    *engines.FAULTS,
    *memory.FAULTS,
)
