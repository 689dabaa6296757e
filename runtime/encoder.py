"""Which codec encodes a tensor, and what is learnt of that."""

from __future__ import annotations

from torch import Tensor

from ssd_fx.runtime import codec
from ssd_fx.runtime.adapt.habits import PLAIN, Habits
from ssd_fx.runtime.codec import Encoded
from ssd_fx.runtime.config import RuntimeConfig
from ssd_fx.runtime.memory import tensors
from ssd_fx.runtime.states import Entry
from ssd_fx.runtime.stats import counters


class Encoder:
    """Encodes what is on its way to a tier that has a codec. `codecs`: by tier."""

    def __init__(self, config: RuntimeConfig, habits: Habits) -> None:
        self.codecs = dict(config.compression)
        self._habits = habits

    def codec_of(self, entry: Entry) -> str:
        """That of the plan's tier, even if the tensor ends up in another, or moves on; empty for none."""
        return self.codecs.get("host" if entry.tier == "host" else "ssd", "") if self.codecs else ""

    def encode(self, entry: Entry, name: str) -> tuple[Tensor, Encoded] | None:
        """The payload of what an entry holds; None if it stays as it is."""
        habit = self._habits.of(entry.graph, entry.slot)
        if habit.is_plain(name):
            return None
        x = entry.held
        assert x is not None, "only called for what is in memory"
        lossy = codec.is_lossy(name, x.dtype)
        if lossy and entry.layout != entry.seen:
            return None  # the values in the gaps of the tensor would change the scale of their block
        made = codec.encode(name, x)
        if made is None:
            if not lossy:  # a lossy codec refuses infinities, which the next tensor of the slot may not have
                habit.plain[name] = PLAIN
            return None
        payload, encoded = made
        if encoded.lossy and habit.error is None:
            decoded = tensors.empty(entry.layout, entry.device)
            encoded.decode(payload, decoded)
            habit.error = codec.relative_error(x, decoded)
        counters(entry.graph).encoded(entry.nbytes, encoded.nbytes, habit.error or 0.0)
        return made
