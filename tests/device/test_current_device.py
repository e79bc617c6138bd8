"""Kernels run on their tensors' device, whatever the current one is: a fake device follows the guards."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)
from baselines.kivi import KIVI
from pqcache.device import packed_step, step, switch, triton_attend, triton_codes, triton_compile, triton_packed
from pqcache.selective import captured
from pqcache.selective.captured import CapturedSteps
from tests.device.driven import SHAPE, Driven, made

if torch.cuda.is_available():
    pytest.skip("a second device would be needed", allow_module_level=True)

SECOND = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device, which is the first one."""
    now = [0]

    @contextlib.contextmanager
    def device(where: torch.device):
        before, now[0] = now[0], where.index
        yield
        now[0] = before

    own = switch.device_of
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    there = SimpleNamespace(is_cuda=True, device=SECOND, get_device=lambda: 1)
    for module in (switch, captured, triton_attend, triton_codes, triton_packed, triton_compile, packed_step, step):
        # the CPU's tensors stand for the second device's
        monkeypatch.setattr(module, "device_of", lambda x: own(there))
    return now


def test_every_kernel_is_launched_on_its_tensors_device(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, set[int]] = {}

    def note(kernel, *args, **options):
        launched.setdefault(kernel.__name__, set()).add(current[0])

    monkeypatch.setattr(type(triton_codes._enter), "run", note)
    triton_compile.calls(quick=True)
    assert len(launched) >= 15, launched
    assert set().union(*launched.values()) == {1}, launched


@pytest.mark.parametrize("store", ["codes", "resident", pytest.param("host", marks=pytest.mark.rest)])
def test_a_prepared_step_is_launched_there_too(current: list[int], monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    run = Driven(KIVI(group=8, residual=8).make_layer(0, SHAPE) if store == "codes" else made(store), [60])
    launched: list[int] = []
    monkeypatch.setattr(type(triton_codes._enter), "run", lambda *args, **options: launched.append(current[0]))
    with switch.interpreted():
        run.step()
        run.step()
    assert len(launched) >= 8 and set(launched) == {1} and current == [0]


def test_the_current_device_comes_back(current: list[int]) -> None:
    with switch.device_of(torch.zeros(1)):
        assert current == [1]
    assert current == [0]


class Stream:
    def wait_stream(self, other: object) -> None:
        pass


def test_steps_are_recorded_and_replayed_on_their_device(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int]] = []

    class Graph:
        def replay(self) -> None:
            log.append(("replay", current[0]))

    @contextlib.contextmanager
    def graph(_: Graph, stream: Stream | None = None):
        assert stream is not None  # the default one belongs to the device of the process's first recording
        log.append(("record", current[0]))
        yield

    class Cache:
        layers, past, columns, observers, watchers, recording = (), [3], 3, (), (), False

        def check_window(self, tokens: int) -> None:
            pass

        def note_step(self) -> None:
            log.append(("count", current[0]))

    for name, fake in (("Stream", lambda *_: Stream()), ("current_stream", lambda *_: Stream()), ("graph", graph)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(CapturedSteps, "forward", lambda self: None)
    with switch.interpreted():
        steps = CapturedSteps(None, Cache(), torch.zeros((1, 1), dtype=torch.long), 4)  # type: ignore[arg-type]
        steps.replay()
        steps.replay()
    assert log == [("record", 1), ("replay", 1), ("count", 0)] and current == [
        0
    ]  # the host counts while the device works
