"""What needs a GPU: real tensors on it, real NVML, real processes. One GPU is enough: all ranks share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_figures: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("this needs an NVIDIA GPU that torch can use, and here is none")


@pytest.fixture(scope="session")
def tell() -> Callable[[str], None]:
    """Print a line once all tests have run: figures, which no test judges."""
    return _figures.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _figures:
        terminalreporter.write_line(line)


LONG_CYCLES = 4_000_000_000  # a second and more


@pytest.fixture
def busy() -> Callable[[], Any]:
    """Give the GPU work that takes longer than anything beside it; return the event of its end."""
    import torch

    def begin() -> Any:
        torch.cuda._sleep(LONG_CYCLES)
        end = torch.cuda.Event()
        end.record()
        return end

    return begin


@pytest.fixture(scope="session")
def used_bytes() -> Callable[[], int]:
    """How much of the first GPU's memory is taken, by whichever process."""
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)
