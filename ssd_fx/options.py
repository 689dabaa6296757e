"""The options: their names, meanings and defaults, and who reads them. `docs/options.md` is made from the docstring.

An option is named here alone. The planner and the runtime read the same class, each in a view of its own:

    Config.make({...})  --view(PLAN)-->     PlanOptions   in the keys of compile caches
                        --runtime_json-->   Options       in the arguments of the operators, as JSON

An option that a view leaves out has its default there. So a change of it compiles nothing again, and makes no second
store.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_type_hints

from ssd_fx.policy import Policy
from ssd_fx.ranks import Ranks, dealt, in_a_directory, on_a_drive

PLAN, RUNTIME = "plan", "runtime"
"""Who reads an option: the planner or the runtime. The backend itself reads them all."""

Tier = Literal["ssd", "host"]
TIERS: tuple[Tier, Tier] = ("ssd", "host")
"""Where what is offloaded goes: to the drives, or to host memory beside a device's own."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one `torch.compile` call.

    `dirs`, `disk_limit`, `drive_tbw`, `host_budget` and the bandwidths of `machine` belong to the node. Its ranks share
    them. All other options belong to one process.

    dirs (a directory or a list of them; in the environment separated by `:`): Directories on the drives. A large
        tensor is striped over all of them; a small one goes to the least busy drive. Several ranks divide the
        directories among them. Default: the system's temporary directory.
    memory (a size, a share or `"auto"`): The most that all tensors of the process may take on the device that computes:
        parameters, gradients, the optimizer's state, activations of all graphs. A size (`"24GiB"`), a share of what the
        device has (`"90%"`), or `"auto"`, which is what others leave, less 5%. On the CPU the device has what the
        machine, the container and `RLIMIT_DATA` allow. The first step runs with the lowest peak, as with `budget=0`.
        From the second one on as much stays in memory as fits. When that is known the plan is made once more, if a step
        is predicted to be shorter then (`adapt`). Instead of `budget`. Default: no limit.
    budget (a size, a share or `"auto"`): Saved tensors that may stay in memory. A size (`"2GiB"`) is one budget over
        all graphs of the process; at run time the tensors stored last stay. A size below what one graph must keep in
        memory is an error that names the least possible size. A number below a MiB without a unit is an error, because
        100 may mean MiB or percent. 0 is never an error. It is the lowest peak of memory that is worth having: one up
        to 5% higher is taken if the step is a tenth faster. A share (`0.25`, `"25%"`) allows a peak that lies so far
        between the lowest and the one with everything kept. `"auto"` is the least of the shares 0, 0.05, 0.1 and so on
        whose step is predicted to take no longer than `slowdown` allows. If the drive of a CPU turns out to be slower
        than predicted, more stays in memory from then on.
    slowdown (a share): How much longer a step may become with `budget="auto"`, to need less memory: `0.05`, `"5%"`. All
        counts: waits for drives, what is computed again, and starting transfers. At 0.02 memory is nearly free. At 0.3,
        which is what a checkpoint of every layer costs, a step needs less memory than with that.
    spare (a flag): Spare the drive: in a graph that is a whole training step, with the loss, what does not lower the
        peak stays in memory. A budget in bytes other than 0 does not look at it. Turn it off where several forwards
        come before the first backward, as in some pipelines. There a share is also one of the bytes that can leave: so
        many of them may stay.
    recompute (a flag): Recompute tensors where that is predicted to be faster than the drive.
    min_bytes (a size): Smaller tensors stay in memory, unless `ssd_fx.offload(x)` marks them.
    engine (a name): `"posix"` is direct file I/O. `"kvikio"` is GPUDirect Storage or an error; `"kvikio-forced"` also
        accepts its compatibility mode, which copies through host memory. `"memory"` copies to host memory, for
        comparisons. `"auto"` takes GPUDirect Storage for tensors on a GPU where it works, else direct file I/O. On
        accelerators that are not NVIDIA's, files are reached through pinned memory, which is slower.
    inner (a name): The compiler that gets the rewritten graphs: `"inductor"` or `"aot_eager"`.
    inflight (a size above 0, or `"auto"`): The most bytes that may be on their way to the drives. A store beyond it
        waits for room. `"auto"` is 128 MiB for tensors of the CPU. For those of a GPU it is 1/32 of its memory, because
        the host runs ahead of a GPU. If the plan has more on its way at a time, it is that.
    prefetch (a size): Bytes that may be read before the graph asks for them.
    dump (a directory): Gets the plan and both rewritten graphs of everything that is compiled. The directory is made
        if it is missing. With this option no compiled graph comes from the compile cache.
    allow_tmpfs (a flag): Accept a directory that is in memory, which saves no memory.
    checksums (a flag): Compute a checksum of every block that is written, and compare it when the block is read.
    disk_limit (a size above 0): The most bytes that one set of options may take in each directory. Ranks divide it
        among their files. Default: no limit but the free space.
    drive_tbw (a number of TB): What the drives of `dirs` are rated to be written in all, summed over them: 1200 for two
        drives of 600 TBW. Only `ssd_fx.stats()` uses it, that of the last compilation, to say how long new drives
        would last at the present speed. It is not read from the drives, because SMART needs root and does not have the
        rating; `ssd-fx doctor` says what SMART has. Default: not known.
    host_budget (a size): Bytes of offloaded tensors that may be in host memory instead of on disk. On a GPU the plan
        chooses the tensors. On the CPU this is the same memory as that of `budget`. Tensors on their way from there to
        the drive take up to `inflight` bytes more, 128 MiB if that is `"auto"`.
    compression (a name, or names per tier): `"bitpack"` is lossless, and shrinks masks, small integers and the zeros
        of ReLU. `"fp8"` and `"int8"` are lossy. With them, floats that the backward compares with each other stay in
        memory: a maximum, and the tensor that it is of. `"int8"` makes 0 of what is below 1/254 of the largest of its
        block, so a backward that divides by such numbers returns infinities. A backward that takes `exp` of what it
        has read multiplies errors: that of `cross_entropy` under Inductor, with large logits. A name alone is for the
        drive. `{"host": "bitpack", "ssd": "fp8"}`, or `host=bitpack,ssd=fp8` in the environment, names one codec per
        tier. A tensor that enters no tier with a codec keeps its exact values. A slow drive makes more do so (`adapt`).
    adapt (a flag): Learn from the steps that ran. Stop writing a tensor that the program holds anyway, and read
        earlier what was waited for. On a CPU with `budget="auto"`, keep more in memory while the drive is slow. With
        `memory`, compile again for the room that is left.
    cpu_allocator (a flag): On the CPU, take the memory of all tensors of the process from 64 KiB on from ssd_fx's own
        allocator, from the first compilation on. It gives idle memory back to the system; malloc keeps most of it. A
        process that preloads its own malloc, such as jemalloc, is left alone.
    keep (patterns of module names; in the environment separated by `,`): What these modules save stays in memory,
        whatever the budget: `["head", "blocks.[0-3].attn", "*.norm"]`. Names are those of `named_modules()`. A pattern
        also holds for everything inside the modules that it names. A budget in bytes below what they keep is an error.
    offload (patterns of module names, as for `keep`): What these modules save is offloaded, whatever the budget, from
        `min_bytes` on. Where both options match, the innermost module decides. `ssd_fx.keep(x)` and
        `ssd_fx.offload(x)` in the model override both.
    policy (a function, or its place such as `"package.module:function"`): It is asked about each saved tensor that may
        leave memory, from `min_bytes` on, and gets an `ssd_fx.SavedTensor`: name, module, op, shape, dtype, nbytes. It
        returns `"keep"`, `"offload"`, `"recompute"`, or None where the planner shall decide. What `keep`, `offload` and
        calls in the model say overrides it. It is asked when a graph is compiled, several times about a tensor, and
        must answer alike. If it has a method `uuid()`, the result is its identity in compile caches, as of Inductor's
        custom passes. Without one no process finds graphs in the cache that another one has compiled with a policy.
    machine (`"auto"`, `"default"` or a dictionary): The rates that plans are made for. `"auto"` measures them once,
        which takes some seconds, and keeps them in the user's cache directory. `"default"` takes typical rates and
        measures nothing. A dictionary, in the environment JSON, overrides typical rates: fields of
        `ssd_fx.passes.cost.machine.Machine` such as `{"flops": 3e14, "write_bw": 6e9}`.
    ranks (`"auto"` or a number): Processes that share this node. `"auto"` reads `LOCAL_WORLD_SIZE`, which torchrun
        sets, and is 1 without it. For a number above 1, `LOCAL_RANK` must say which of them this process is. 1 shares
        nothing. Default: `"auto"`.
    """

    dirs: Annotated[tuple[str, ...], "directories", RUNTIME] = ()
    memory: Annotated[int | float | str, "memory", RUNTIME] = ""
    budget: Annotated[int | float | str, "budget", PLAN, RUNTIME] = "auto"
    slowdown: Annotated[float, "share", PLAN, RUNTIME] = 0.05
    spare: Annotated[bool, "flag", PLAN] = True
    recompute: Annotated[bool, "flag", PLAN] = True
    min_bytes: Annotated[int, "size", PLAN] = 1 << 20
    engine: Annotated[str, "engine", PLAN, RUNTIME] = "auto"
    inner: Annotated[str, "compiler", PLAN] = "inductor"
    inflight: Annotated[int | str, "size or auto", RUNTIME] = "auto"
    prefetch: Annotated[int, "size", PLAN, RUNTIME] = 64 << 20
    dump: Annotated[str, "path"] = ""
    allow_tmpfs: Annotated[bool, "flag", RUNTIME] = False
    checksums: Annotated[bool, "flag", RUNTIME] = True
    disk_limit: Annotated[int, "limit", RUNTIME] = 0
    drive_tbw: Annotated[float, "terabytes"] = 0.0
    host_budget: Annotated[int, "size", PLAN, RUNTIME] = 0
    compression: Annotated[tuple[tuple[str, str], ...], "codecs", RUNTIME] = ()
    adapt: Annotated[bool, "flag", RUNTIME] = True
    cpu_allocator: Annotated[bool, "flag"] = True
    keep: Annotated[tuple[str, ...], "patterns", PLAN] = ()
    offload: Annotated[tuple[str, ...], "patterns", PLAN] = ()
    policy: Annotated[Policy | None, "function", PLAN] = None
    machine: Annotated[str, "machine"] = "auto"
    ranks: Annotated[Ranks, "ranks", RUNTIME] = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        relative = [path for path in self.dirs if not os.path.isabs(path)]
        if relative:
            raise ValueError(f"dirs must be absolute, because a process may change its directory: {relative}")
        for name in ("budget", "inflight", "prefetch", "disk_limit", "host_budget"):
            value = getattr(self, name)
            if not isinstance(value, str) and value < 0:
                raise ValueError(f"{name} must be >= 0, not {value}")
        if self.ranks.count <= 0:
            raise ValueError(f"ranks must be > 0, not {self.ranks.count}")

    def __hash__(self) -> int:
        """Hashes two fields only: every store looks up its options, and hashing all takes longer than the rest."""
        return hash((self.engine, self.dirs))

    @property
    def resident(self) -> int:
        """The most bytes that stay where they are, unwritten, over all graphs: a budget in bytes."""
        return self.budget if isinstance(self.budget, int) else 0

    @property
    def resident_at_most(self) -> int:
        """The limit in bytes to which the runtime may raise `resident` while a graph waits for the drive."""
        return sys.maxsize if self.budget == "auto" else 0

    @property
    def inflight_bytes(self) -> int:
        """The most bytes that are being written at a time; 0 for what suits the device."""
        return 0 if isinstance(self.inflight, str) else self.inflight

    @property
    def copies_only(self) -> bool:
        """Whether a device's tensors go to host memory and no further."""
        return self.engine == "memory"

    @property
    def own_dirs(self) -> tuple[str, ...]:
        """The directories of `dirs` that this rank writes to."""
        return dealt(self.dirs, self.ranks)

    @property
    def own_host_budget(self) -> int:
        """This rank's share of `host_budget`, in bytes."""
        return self.host_budget // self.ranks.count

    @property
    def own_disk_limit(self) -> int:
        """The most bytes of this rank's file in a directory; 0 for no limit."""
        if not self.disk_limit:
            return 0
        return max(1, self.disk_limit // in_a_directory(self.dirs, self.ranks))

    @property
    def own_drive_tbw(self) -> float:
        """This rank's share of what the drives are rated for, in TB; 0 if that is not known."""
        return self.drive_tbw / self.ranks.count

    @property
    def own_dump(self) -> str:
        """The directory of this rank's dump. Each rank has one, because their graphs have the same names."""
        if self.ranks.number is None or not self.dump:
            return self.dump
        return f"{self.dump}/rank{self.ranks.number}"

    def sharing(self) -> int:
        """How many ranks share the bandwidth of this one's drives. Directories of one file system are one drive.

        Raises:
            OSError: a directory that is missing.
        """
        if self.engine == "memory" or self.ranks.count == 1:
            return self.ranks.count
        return on_a_drive(self.dirs, self.ranks, lambda path: os.stat(path).st_dev)

    def share(self) -> str:
        """One line about this rank's share of the node; empty if the node is not shared."""
        if self.ranks.count == 1:
            return ""
        own = f"writes to {', '.join(self.own_dirs)}, whose bandwidth {self.sharing()} ranks share"
        return f"{self.ranks}: {own}; host_budget {self.own_host_budget} B, disk_limit {self.own_disk_limit} B"

    def digest(self) -> str:
        """A digest of the options by which plans or counts of equal graphs differ; the same for all ranks of a node."""
        apart = ("dirs", "allow_tmpfs", "disk_limit", "drive_tbw", "dump", "ranks")  # of the node, or of where files go
        chosen = {f.name: getattr(self, f.name) for f in fields(Options) if f.name not in apart}
        for name in ("memory", "policy"):  # where unset, graphs keep the names from before the option
            if not chosen[name]:
                del chosen[name]
        return hashlib.sha256(repr(chosen).encode()).hexdigest()

    def view(self, reader: str) -> dict[str, Any]:
        """The options that `reader` reads, by name: PLAN or RUNTIME. Those of the node are this rank's share."""
        own = {"dirs": self.own_dirs, "host_budget": self.own_host_budget, "disk_limit": self.own_disk_limit}
        return {name: own.get(name, getattr(self, name)) for name, notes in noted().items() if reader in notes[1:]}

    def runtime_json(self) -> str:
        """What the runtime obeys, as canonical JSON. Compiled graphs carry it, and equal ones share a store."""
        sent = self.view(RUNTIME) | {"dirs": list(self.own_dirs), "compression": dict(self.compression)}
        sent["ranks"] = self.ranks.count
        if isinstance(self.budget, float):
            sent["budget"] = 0  # a share is a matter of the plan
        if self.budget != "auto":
            del sent["slowdown"]  # only under "auto" the runtime changes what stays
        if self.budget != "auto" and not self.memory:
            del sent["ranks"]  # only under these two ranks share free memory
        if not self.memory:
            del sent["memory"]
        return json.dumps(sent, sort_keys=True, separators=(",", ":"))


@functools.cache
def noted() -> dict[str, tuple[str, ...]]:
    """The notes of each option, by name: its kind, by which `config.py` parses it, and its readers."""
    hints = get_type_hints(Options, include_extras=True)
    return {f.name: hints[f.name].__metadata__ for f in fields(Options)}
