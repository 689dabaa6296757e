"""Compression: what is lossless is bitwise, what is lossy stays within the error that it reports."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ssd_fx.runtime import codec, encoder, entries
from ssd_fx.runtime.codec import bitpack, quantized
from ssd_fx.runtime.codec.base import SLICE
from ssd_fx.runtime.entries import lookup
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.states import State
from ssd_fx.runtime.stats import stats
from ssd_fx.runtime.stores import close_stores, get_store
from tests.runtime.harness import config_json, load, raw, release, settle, store, watch

pytestmark = pytest.mark.usefixtures("no_device")
N = 30_001  # no multiple of 8 or of a block


def decoded(x, name):
    made = codec.encode(name, x)
    if made is None:
        return None
    payload, encoded = made
    assert (payload.dtype, payload.dim(), payload.numel()) == (torch.uint8, 1, encoded.nbytes)
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    encoded.decode(payload, out)
    return out, encoded


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, N])
def test_bits_survive(count):
    bools = torch.rand(count) < 0.5
    assert torch.equal(bitpack.unpack_bits(bitpack.pack_bits(bools), count), bools)


def test_every_byte_of_eight_bools():
    bools = (torch.arange(256).unsqueeze(1) >> torch.arange(8)).bitwise_and(1).bool().flatten()
    assert torch.equal(bitpack.pack_bits(bools), torch.arange(256, dtype=torch.uint8))


def test_a_mask_takes_an_eighth():
    x = (torch.rand(100, 301) < 0.9).t()  # dense, and not contiguous
    out, encoded = decoded(x, "bitpack")
    assert torch.equal(out, x)
    assert encoded.nbytes == -(-x.numel() // 8)
    assert not encoded.lossy


@pytest.mark.parametrize(
    ("low", "high", "itemsize"),
    [(0, 255, 1), (0, 256, 2), (-128, 127, 1), (-129, 0, 2), (0, 32_768, 4), (-(2**31), 2**31 - 1, 4)],
)
def test_integers_take_what_their_range_needs(low, high, itemsize):
    x = torch.randint(low, high, (N,))
    x[0], x[1] = low, high
    out, encoded = decoded(x, "bitpack")
    assert torch.equal(out, x)
    assert encoded.nbytes == itemsize * N


def test_integers_of_full_range_stay():
    assert codec.encode("bitpack", torch.tensor([0, 2**40])) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_relu_output_is_its_positive_half(dtype):
    """Negative zeros, NaNs and infinities are values like any other: bit for bit."""
    x = torch.randn(N).relu().to(dtype)
    x[:4] = torch.tensor([-0.0, float("nan"), float("inf"), -float("inf")], dtype=dtype)
    out, encoded = decoded(x, "bitpack")
    assert raw(out) == raw(x)
    nonzero = int((x.view(torch.uint8).view(N, -1) != 0).any(1).sum())
    assert encoded.nbytes == -(-N // 8) + nonzero * x.itemsize


def test_dense_floats_stay_without_a_lossy_codec():
    assert codec.encode("bitpack", torch.randn(N)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "error"), [("fp8", 0.03), ("int8", 0.01)])
def test_lossy_error(name, error, dtype):
    """e4m3 has 3 bits of mantissa: at most 1/16 off, 2.6% in the mean square. int8: half of a block's largest / 127."""
    torch.manual_seed(0)
    x = torch.randn(N).to(dtype)
    out, encoded = decoded(x, name)
    assert encoded.lossy
    assert encoded.nbytes == -(-N // 128) * (128 + 4)
    assert codec.relative_error(x, out) < error
    assert codec.relative_error(x, out) > error / 4  # it is not exact either: the figure means something


def test_the_error_is_measured_in_little_memory():
    """The tensor lives meanwhile, and so do its encoded form and the decoded one: that is near the peak of a step."""
    CPU_ALLOCATOR.install()
    x, y = torch.randn(2, 8 * SLICE)
    whole = float((x.double() - y.double()).norm() / x.double().norm())
    CPU_ALLOCATOR.take_peak()
    before = CPU_ALLOCATOR.live_bytes
    assert codec.relative_error(x, y) == pytest.approx(whole)
    assert CPU_ALLOCATOR.take_peak() - before < x.nbytes


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_lossy_blocks_have_scales_of_their_own(name):
    x = torch.cat([torch.randn(128) * scale for scale in (1e-30, 1e-3, 1.0, 1e30)] + [torch.zeros(5)])
    out, _ = decoded(x, name)
    for block in range(4):
        part = slice(128 * block, 128 * block + 128)
        assert codec.relative_error(x[part], out[part]) < 0.04
    assert torch.equal(out[512:], torch.zeros(5))


@pytest.mark.parametrize("name", codec.CODECS)
def test_sizes_that_are_known_before(name):
    """To the byte, of whole blocks."""
    for dtype, share in codec.shrinks(name).items():
        x = (
            torch.randn(64 * quantized.BLOCK) > 0
            if dtype is torch.bool
            else torch.randn(64 * quantized.BLOCK).to(dtype)
        )
        payload, encoded = codec.encode(name, x)
        assert payload.numel() == encoded.nbytes == share * x.nbytes


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lossy_makes_no_infinities(name, dtype):
    """A scale is rounded, so the largest number times it may be too large for the dtype: int8 and float32's maximum."""
    x = torch.zeros(300, dtype=dtype)
    x[:150] = torch.finfo(dtype).max
    x[150:] = torch.finfo(dtype).min
    payload, encoded = codec.encode(name, x)
    out = torch.empty_like(x)
    encoded.decode(payload, out)
    assert out.isfinite().all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_lossy_leaves_infinities_alone(poison):
    x = torch.randn(N)
    x[17] = poison
    assert codec.encode("fp8", x) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.complex64, torch.float8_e4m3fn])
def test_other_types_stay(dtype):
    assert codec.encode("fp8", torch.ones(N).to(dtype)) is None


@pytest.mark.parametrize("engine", ["posix", "memory"])
@pytest.mark.parametrize("on_disk", [True, False])
def test_store_writes_the_packed_bits(tmp_path, engine, on_disk):
    config = config_json(tmp_path, engine, compression={"ssd": "bitpack"})
    x = (torch.rand(800_003) < 0.9).view(1, -1)
    h = store(x, config)
    assert lookup(h).encoded
    gone, expected = watch(x), x.clone()
    release(h, x)
    del x
    assert gone.expired()  # at once: what is written is the encoded copy
    if on_disk:
        settle(h)
    assert torch.equal(load(h, expected), expected)
    assert stats().encoded_from_bytes == 800_003
    assert stats().encoded_to_bytes == 100_001
    assert stats().encoding_error == 0
    if on_disk:
        assert stats().written_bytes == stats().read_bytes == 100_001


def test_lossy_values_do_not_depend_on_timing(tmp_path):
    """What a load gives is the decoded tensor, whether its write was done or not; and the report says how far off."""
    x = torch.randn(100_003)
    config = config_json(tmp_path, compression={"ssd": "fp8"})
    early, late = store(x, config), store(x, config)
    settle(late)
    a, b = load(early, x), load(late, x)
    assert raw(a) == raw(b) != raw(x)
    assert stats().encoding_error == pytest.approx(codec.relative_error(x, a))


def test_encoded_load_in_another_layout(tmp_path):
    config = config_json(tmp_path, compression={"ssd": "bitpack"})
    x = (torch.rand(300, 500) < 0.5).t()
    h = store(x, config)
    settle(h)
    like = torch.empty(x.shape, dtype=torch.bool)  # contiguous
    assert torch.equal(load(h, like), x)


def test_what_does_not_shrink_is_tried_again_now_and_then(tmp_path, monkeypatch):
    """After so many stores, however often the writer asks about each: where it rests, and when it is written."""
    monkeypatch.setattr(encoder, "PLAIN", 4)
    config = config_json(tmp_path, compression={"ssd": "bitpack"})
    calls = []
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda *args: calls.append(args) or encode(*args))
    counts = []
    for _ in range(12):
        x = torch.randn(N)
        h = store(x, config)
        get_store(config).writer._encoder.wants(lookup(h), "bitpack")
        assert raw(load(h, x)) == raw(x)
        counts.append(len(calls))
    assert counts == [1] * 5 + [2] * 5 + [3] * 2


def test_encoding_at_rest(tmp_path):
    """The host tier has a codec of its own: more fits."""
    config = config_json(tmp_path, compression={"host": "bitpack"}, host_budget=2 * 100_001)
    xs = [torch.rand(800_003) < 0.5 for _ in range(3)]
    handles = [store(x, config, slot=i) for i, x in enumerate(xs)]
    settle(handles[0])
    for h, x in zip(handles, xs, strict=True):
        release(h, x)
    assert [lookup(h).state.where for h in handles] == ["disk", "memory", "memory"]
    for h, x in zip(handles, xs, strict=True):
        assert torch.equal(load(h, x), x)


def test_what_rests_beyond_the_plan_is_not_encoded(tmp_path):
    """It rests because the drive is slow; a lossy codec of a host tier that the user did not size must not see it."""
    config = config_json(tmp_path, compression={"host": "fp8"}, budget="auto", slowdown=0.02)
    get_store(config).residency.nbytes = 1 << 40
    x = torch.randn(N)
    handle = store(x, config)
    assert (lookup(handle).state, lookup(handle).encoded) == (State.RESIDENT, None)
    assert raw(load(handle, x)) == raw(x)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_denormals_keep_their_signs(name):
    """The scale of a block of them is a coarse denormal itself: the quotient may be too large for the type."""
    x = torch.cat([torch.full((128,), tiny) for tiny in (1e-45, 3e-45, 9.1e-43, 1e-40, 1e-38)])
    out, _ = decoded(x, name)
    assert (out >= 0).all()
    out, _ = decoded(-x, name)
    assert (out <= 0).all()


def test_bools_of_any_byte():
    x = torch.randint(0, 256, (1000,), dtype=torch.uint8).view(torch.bool)
    out, _ = decoded(x, "bitpack")
    assert torch.equal(out, x)


def test_a_codec_per_tier_does_not_stand_in_the_way_of_the_other(tmp_path):
    config = config_json(tmp_path, compression={"host": "bitpack", "ssd": "fp8"}, host_budget=4 * N)
    x = torch.randn(N)
    handles = [store(x, config, slot=i % 2) for i in range(4)]
    assert [bool(lookup(h).encoded) for h in handles] == [True, True, True, False]


def test_an_infinity_turns_a_lossy_codec_off_for_one_step(tmp_path):
    config = config_json(tmp_path, compression={"ssd": "fp8"})
    x = torch.randn(N)
    x[0] = float("inf")
    assert lookup(store(x, config)).encoded is None
    x.data[0] = 0.0
    h = store(x, config)
    assert lookup(h).encoded


class Encoding:
    """A codec in the middle of its work: what `meanwhile` does comes from another thread."""

    def __init__(self, monkeypatch, x, config):
        self.started, self.goes_on = threading.Event(), threading.Event()
        self.encode = codec.encode
        monkeypatch.setattr(codec, "encode", self._encode)
        self.handles = []
        self.thread = threading.Thread(target=lambda: self.handles.append(store(x, config)))
        self.thread.start()
        assert self.started.wait(60)
        with entries.GUARD.lock:
            (self.entry,) = entries._entries.values()
        assert self.entry.state is State.ENCODING

    def _encode(self, name, x):
        self.started.set()
        assert self.goes_on.wait(60)
        return self.encode(name, x)

    def end(self):
        self.goes_on.set()
        self.thread.join()
        return self.handles[0]


@pytest.fixture(params=["ssd", "host"])
def encoding_config(request, tmp_path):
    """`ssd`: encoded when it is written. `host`: when it is stored, and then it is resident."""
    return config_json(
        tmp_path, compression={request.param: "bitpack"}, host_budget=N if request.param == "host" else 0
    )


def test_others_store_and_load_while_a_codec_works(monkeypatch, tmp_path, encoding_config):
    x, y = torch.rand(N) < 0.5, torch.randn(N)
    encoding = Encoding(monkeypatch, x, encoding_config)
    other = store(y, config_json(tmp_path))
    settle(other)
    assert raw(load(other, y)) == raw(y)
    handle = encoding.end()
    assert lookup(handle).encoded
    assert raw(load(handle, x)) == raw(x)
    del handle
    encoding.handles.clear()
    assert lookup(other)  # and deals with what died
    assert get_store(encoding_config).ledger.writing_bytes == 0


def test_what_is_copied_aside_while_a_codec_works_is_encoded_again(monkeypatch, encoding_config):
    """Its owner writes over it meanwhile."""
    x = torch.rand(N) < 0.5
    expected = x.clone()
    encoding = Encoding(monkeypatch, x, encoding_config)
    number = next(iter(entries._entries))
    handle = entries.stand_in(x.shape, x.dtype, x.device)  # the op has not returned its own yet
    handle.untyped_storage().ssd_fx = number
    release(handle, x, hand_over=False)
    x.zero_()
    handle = encoding.end()
    settle(handle)
    assert raw(load(handle, expected)) == raw(expected)
    assert stats().encoded_to_bytes == (N + 7) // 8 * (encoding.entry.encoded is not None)


def test_a_tensor_that_dies_while_a_codec_works_on_it(monkeypatch, tmp_path):
    """The store of another one, which pushes it out of memory, is none the worse for that."""
    config = config_json(tmp_path, compression={"ssd": "fp8"}, budget=5 * N)
    first, second = torch.randn(N), torch.randn(N)
    other, handles = store(first[:10], config_json(tmp_path)), [store(first, config)]
    encode = codec.encode

    def dies(name, x):
        handles.clear()
        assert lookup(other)  # and deals with what died
        return encode(name, x)

    monkeypatch.setattr(codec, "encode", dies)
    handle = store(second, config, slot=1)
    assert not handles
    assert raw(load(handle, second)) == raw(second)


def test_a_store_that_ends_while_a_codec_works(monkeypatch, encoding_config):
    x = torch.rand(N) < 0.5
    encoding = Encoding(monkeypatch, x, encoding_config)
    ledger = get_store(encoding_config).ledger
    close_stores()
    handle = encoding.end()
    assert lookup(handle).encoded is None
    assert raw(load(handle, x)) == raw(x)
    assert (ledger.writing_bytes, ledger.resident_bytes, stats().encoded_to_bytes) == (0, 0, 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_could_not_be_encoded_stays_as_it_is(monkeypatch, encoding_config, error):
    x = torch.rand(N) < 0.5
    with monkeypatch.context() as patched:
        patched.setattr(codec, "encode", lambda *_: (_ for _ in ()).throw(error("planted")))
        with pytest.raises(error):
            store(x, encoding_config)
    ledger = get_store(encoding_config).ledger
    assert (ledger.writing_bytes, ledger.resident_bytes) == (0, 0)
    handle = store(x, encoding_config)
    assert lookup(handle).encoded
    assert raw(load(handle, x)) == raw(x)


ONE_FILE = """
import zlib
import torch
from ssd_fx.runtime.codec.base import Codec, Encoded

def encode(x):
    packed = bytearray(zlib.compress(x.numpy().tobytes()))
    return torch.frombuffer(packed, dtype=torch.uint8), Encoded(len(packed), False, decode)

def decode(payload, out):
    out.copy_(torch.frombuffer(bytearray(zlib.decompress(payload.numpy().tobytes())), dtype=out.dtype))

CODECS = (Codec("deflate", encode),)
"""


def test_a_codec_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "deflate.py").write_text(ONE_FILE)
    monkeypatch.setattr(codec, "__path__", [*codec.__path__, str(tmp_path)])
    found = codec.found()
    assert set(found) == {"bitpack", "deflate", "fp8", "int8"}
    for name, each in found.items():
        monkeypatch.setitem(codec.CODECS, name, each)
    config = config_json(tmp_path, compression={"ssd": "deflate"})
    x = torch.zeros(N)
    x[17] = 3.0
    handle = store(x, config)
    assert settle(handle).extent.nbytes < N
    assert raw(load(handle, x)) == raw(x)


def test_threads_encode_at_a_time():
    """No codec needs a lock: each call has memory of its own."""
    xs = [torch.randn(N).relu() * (torch.rand(N) < 0.3) for _ in range(8)]
    with ThreadPoolExecutor(4) as threads:
        for name in codec.CODECS:
            alone = [codec.encode(name, x)[0] for x in xs]
            together = list(threads.map(lambda x, name=name: codec.encode(name, x)[0], xs * 4))
            assert all(torch.equal(a, b) for a, b in zip(alone * 4, together, strict=True))
