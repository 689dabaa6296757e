"""What the runtime says when a stored tensor cannot be had: one function for each error that an operator raises.

`without_number` and `first_line` shorten an error of the system for a message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ssd_fx.runtime.states import Entry


def changed_in_place(entry: Entry, version: int) -> RuntimeError:
    """Somebody wrote into the tensor after its store. The text begins as eager mode's does."""
    kind = torch.empty(0, dtype=entry.layout.dtype, device=entry.device).type()
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(entry.layout.size)}], stored by ssd_fx as {entry.name}, is at version {version}; "
        f"expected version {entry.version} instead"
    )


def changed_while_kept(x: Tensor, version: int) -> RuntimeError:
    """Somebody wrote into a tensor that a checkpoint keeps in memory, after its forward. The text begins as above."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{x.type()} {list(x.shape)}], an argument of a checkpoint, is at version {x._version}; "
        f"expected version {version} instead"
    )


def donated(entry: Entry) -> RuntimeError:
    """A second backward asks for a tensor that the first one got as its own."""
    return RuntimeError(
        f"{entry.name} was given away to a backward that did not keep the graph; a graph that several backwards go "
        "through needs retain_graph=True in all but the last"
    )


def lost(entry: Entry) -> RuntimeError:
    """The bytes went with the store."""
    return RuntimeError(
        f"{entry.name} was lost: ssd_fx.close() was called between its forward and its backward, and closed the file "
        "that it was in; run the forward again"
    )


def not_read(entry: Entry, attempts: int, error: OSError) -> OSError:
    """The drive does not give the bytes back. `error`: that of the last attempt."""
    message = f"load of {entry.name} failed {attempts} times: {error.strerror}"
    return OSError(error.errno, message, error.filename)


def not_loaded(entry: Entry) -> RuntimeError:
    """A wait was given a tensor that is no load's."""
    return RuntimeError(
        f"a wait for {entry.name} was given a tensor that no load of it returned, or one waited for already. Compiled "
        "autograd does that behind another backend: name ssd_fx as the backend of compiled autograd too, or turn "
        "torch._dynamo.config.compiled_autograd off"
    )


def another_buffer(entry: Entry) -> RuntimeError:
    """A release was given memory that was not stored."""
    return RuntimeError(
        f"the release of {entry.name} was given another buffer than its store, so the stored one was not protected "
        "while it was written; the lowerings of store and wait_store_ must share one buffer"
    )


def another_device(entry: Entry, device: torch.device) -> RuntimeError:
    """A load for another kind of device than the store's."""
    return RuntimeError(f"{entry.name} was stored from {entry.device} and cannot be loaded to {device}")


def handle_of_another_graph(handle: Tensor) -> RuntimeError:
    """A backward finds a handle where its own graph keeps the tensor."""
    return RuntimeError(
        f"a backward was given an ssd_fx handle of shape {list(handle.shape)} and {handle.dtype} for a tensor that its "
        "own graph keeps: another compiled graph saved it. torch.utils.checkpoint does that where the forward that "
        "runs again runs another graph, as for another size; mark what varies with torch._dynamo.mark_dynamic"
    )


def no_entry(handle: Tensor, *, inherited: bool, closed: bool) -> RuntimeError:
    """A load was given a handle of the parent process, one of a store that was closed, or none at all."""
    if inherited:
        message = "was stored by the parent process before a fork; run forward and backward in the same process"
    elif closed:
        message = "is gone: the store was closed while a backward was still to come"
    else:
        message = (
            "is none: what the forward saved was exchanged for another tensor. "
            "torch.autograd.graph.saved_tensors_hooks do that when they copy what they pack (save_on_cpu does), and "
            "the handle's storage died then; take the compiled region out of those hooks. torch.utils.checkpoint does "
            "it where the forward that runs again runs another compiled graph, as for another size; mark what varies "
            "with torch._dynamo.mark_dynamic"
        )
    return RuntimeError(f"an ssd_fx handle of shape {list(handle.shape)} and {handle.dtype} {message}")


def without_number(error: Exception) -> str:
    """What `error` says, without the number that Python puts in front: `/mnt/nvme: no permission to ...`."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def first_line(error: object) -> str:
    """The first line of what `error` says, or its kind if it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
