"""Lines of a random program that make views, look at bytes in another way, or change something in place."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.passes.random_graphs import Draft, broadcasts, is_float, is_integer, is_large, is_single


def transposed(d: Draft) -> None:
    x = d.pick(lambda t: t.dim() >= 2)
    d.define(f"{x}.{d.one('transpose', 'movedim', 'swapaxes')}({d.dim(x)}, {d.dim(x)})")


def permuted(d: Draft) -> None:
    x = d.pick(lambda t: t.dim() >= 3)
    d.define(f"{x}.permute({', '.join(map(str, d.draw(_permutations(d.values[x].dim()))))})")


def reshaped(d: Draft) -> None:
    x = d.pick(lambda t: t.numel() > 0)
    sizes = [n for n in range(2, 9) if d.values[x].numel() % n == 0]
    shapes = ["-1", *(f"{n}, -1" for n in sizes), *(f"-1, {n}" for n in sizes), *(f"1, -1, {n}" for n in sizes)]
    d.define(f"{x}.{d.one('view', 'reshape')}({d.one(*shapes)})")


def unsqueezed(d: Draft) -> None:
    x = d.pick(lambda t: t.dim() <= 3)
    d.define(f"{x}.unsqueeze({d.number(-d.values[x].dim() - 1, d.values[x].dim())})")


def squeezed(d: Draft) -> None:
    d.define(f"{d.pick(lambda t: 1 in t.shape)}.squeeze()")


def sliced(d: Draft) -> None:
    x = d.pick(is_large)
    index = d.one("1:", ":-1", "::2", "1::2", "1:3", "0", "-1", ":0", "None")
    d.define(f"{x}[{d.one('', '..., ')}{index}]")


def narrowed(d: Draft) -> None:
    x = d.pick(is_large)
    dim = d.dim(x)
    start = d.number(0, max(d.values[x].shape[dim] - 1, 0))
    d.define(f"{x}.narrow({dim}, {start}, {d.number(0, d.values[x].shape[dim] - start)})")


def selected(d: Draft) -> None:
    x = d.pick(is_large)
    dim = d.dim(x)
    d.define(f"{x}.select({dim}, {d.number(0, max(d.values[x].shape[dim] - 1, 0))})")


def pieces(d: Draft) -> None:
    x = d.pick(is_large)
    dim = d.dim(x)
    size = d.values[x].shape[dim]
    parts = d.number(1, min(4, max(size, 1)))
    each = max(-(-size // parts), 1)
    if d.number(0, 1) and 1 <= size <= 4:
        d.define(f"{x}.unbind({dim})" + ("[0]" if size == 1 else ""), size)
    else:
        results = len(d.values[x].split(each, dim))
        d.define(f"{x}.split({each}, {dim})" + ("[0]" if results == 1 else ""), results)


def expanded(d: Draft) -> None:
    x = d.pick(lambda t: 0 < t.dim() <= 2)
    d.define(f"{x}.unsqueeze(0).expand({d.number(1, 4)}, {', '.join(['-1'] * d.values[x].dim())})")


def strided(d: Draft) -> None:
    """Any sizes, strides and offset within the storage, overlapping or not."""
    x = d.pick(lambda t: t.numel() > 0 and not t.is_conj())
    room = d.values[x].untyped_storage().nbytes() // d.values[x].itemsize
    offset = d.number(0, min(room - 1, 5))
    sizes = d.number(1, 5), d.number(1, 4)
    strides = d.number(0, 5), d.number(0, 3)
    if offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) >= room:
        raise LookupError
    d.define(f"{x}.as_strided({sizes}, {strides}, {offset})")


def diagonal(d: Draft) -> None:
    x = d.pick(lambda t: t.dim() >= 2)
    d.define(f"{x}.diagonal({d.number(-1, 1)}, -2, -1)")


def unfolded(d: Draft) -> None:
    x = d.pick(lambda t: 1 <= t.dim() <= 3 and t.numel() > 0)
    dim = d.dim(x)
    d.define(f"{x}.unfold({dim}, {d.number(1, d.values[x].shape[dim])}, {d.number(1, 2)})")


def joined(d: Draft) -> None:
    x = d.pick(lambda t: t.dim() >= 1)
    y = d.pick(lambda t: t.shape == d.values[x].shape and t.dtype == d.values[x].dtype)
    d.define(f"torch.{d.one('cat', 'stack')}([{x}, {y}], {d.dim(x)})")


def in_place(d: Draft) -> None:
    """A change of an intermediate, of a view of one, or of a buffer."""
    x = _changeable(d)
    where = d.one("", "[0]", "[1:]", "[..., -1:]", ".t()", ".view(-1)", ".unsqueeze(0)", ".flatten()")
    how = d.one("relu_()", "add_(1)", "mul_(2)", "sigmoid_()", "zero_()", "clamp_(-1, 1)", "sin_()", "masked_fill_")
    if how == "masked_fill_":
        how = f"masked_fill_({x}{where}.detach() > 0, 0.5)"
    d.change(f"{x}{where}.{how}")


def in_place_binary(d: Draft) -> None:
    x = _changeable(d)
    y = d.pick(lambda t: is_float(t) and broadcasts(t.shape, d.values[x].shape))
    where = d.one("", "[..., :1]", ".t()")
    d.change(f"{x}{where}.{d.one('add_', 'mul_', 'copy_', 'sub_')}({y}{where})")


def index_put(d: Draft) -> None:
    x = _changeable(d)
    rows = d.values[x].shape[0] if d.values[x].dim() else 0
    if not rows:
        raise LookupError
    index = d.input("index", d.number(1, 3), high=rows)
    y = d.pick(lambda t: is_single(t) and broadcasts(t.shape, d.values[x].shape[1:]))
    d.change(f"{x}.index_put_(({index},), {y}.to({x}.dtype), accumulate={bool(d.number(0, 1))})")


def bits(d: Draft) -> None:
    """The bytes of a value as another dtype."""
    x = d.pick(lambda t: is_float(t) or is_integer(t))
    dtype = d.one("int32", "uint8", "int16", "float32", "bfloat16")
    detached = ".detach()" if d.values[x].requires_grad else ""
    d.define(f"{x}{detached}.view(torch.{dtype})")


def _changeable(d: Draft) -> str:
    """Half of the time a copy of its own, which nothing else has saved."""
    x = d.pick(is_float)
    return d.define(f"{x}.clone()") if d.number(0, 1) else x


def _permutations(n: int) -> st.SearchStrategy[list[int]]:
    return st.permutations(list(range(n)))


def buffer(d: Draft) -> None:
    """A buffer of a size that something has, and something done with it."""
    x = d.pick(lambda t: is_single(t) and t.dim() >= 1)
    name = d.input("buffer", *d.values[x].shape)
    d.define(f"{x} * {name}")
    if d.number(0, 1):
        d.change(f"{name}.{d.one('add_(1)', 'mul_(0.9)', f'copy_({x}.detach())')}")


def alias_input(d: Draft) -> None:
    """An argument that is a view of another one."""
    name = d.one(*(i.name for i in d.inputs if i.kind in ("leaf", "hidden", "buffer")))
    d.define(f"{d.input('alias', of=name + d.one('[1:]', '.t()', '[...]', '.detach()', '.view(-1)'))} * 2")


def make_complex(d: Draft) -> None:
    if d.number(0, 1):
        x = d.pick(lambda t: is_single(t) and t.dim() >= 1 and t.shape[-1] == 2)
        d.define(f"torch.view_as_complex({x})")
    else:
        x = d.pick(is_single)
        y = d.pick(lambda t: is_single(t) and t.shape == d.values[x].shape)
        d.define(f"torch.complex({x}, {y})")


def use_complex(d: Draft) -> None:
    z = d.pick(lambda t: t.is_complex())
    y = d.pick(lambda t: t.is_complex() and broadcasts(t.shape, d.values[z].shape))
    d.define(d.one(f"{z}.conj()", f"{z} * {y}", f"{z} * {y}.conj()", f"{z}.abs()", f"{z}.real", f"{z}.imag",
                   f"torch.view_as_real({z})", f"{z}.resolve_conj()", f"{z}.angle()"))  # fmt: skip


VIEWS = (
    transposed, permuted, reshaped, unsqueezed, squeezed, sliced, narrowed, selected, pieces, expanded, strided,
    diagonal, unfolded, joined, bits, make_complex, use_complex, alias_input,
)  # fmt: skip
CHANGES = (in_place, in_place_binary, index_put, buffer)
