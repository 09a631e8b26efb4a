"""NVIDIA's library as the checks use it: one GPU's calls and field values, and the meaning of errors.

In the library, unreadable field values do not raise, a missing symbol does, and an older nvidia-ml-py lacks
the function. Here all three raise NvmlError.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pynvml

from jurymast.health.probe import HARDWARE, HOST, Verdict

NvmlError: TypeAlias = pynvml.NVMLError

LINK_COUNT = 91
_DROPPED = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT)
# nvmlFieldValue_t without its times, and the formats of its value by type (nvmlValueType_t).
_FIELD_VALUE = struct.Struct("=II16xii8s")
_VALUES = tuple(struct.Struct(f"={letter}") for letter in "dIQQqiH")


@dataclass(frozen=True)
class Problem:
    """What a check found wrong with one GPU, with the fields of `jurymast.health.probe.Finding`."""

    code: str
    verdict: Verdict
    message: str
    kind: str = HARDWARE

    def to_json(self) -> list[str]:
        return [self.code, self.verdict.value, self.message, self.kind]

    @classmethod
    def from_json(cls, values: Sequence[str]) -> Problem:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        code, verdict, message, kind = values
        return cls(code, Verdict(verdict), message, kind)


LOST = Problem("gpu-lost", Verdict.BAD, "it has fallen off the bus, or cannot be reached for another reason")
# Errors that mean a fault of the GPU or its driver, whichever call they come from.
_SPEAKING = {
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: Problem(
        "gpu-power", Verdict.BAD, "its external power cables are not attached properly"
    ),
    pynvml.NVML_ERROR_IRQ_ISSUE: Problem("gpu-interrupts", Verdict.SUSPECT, "its interrupts do not arrive"),
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: Problem(
        "gpu-inforom", Verdict.SUSPECT, "its InfoROM is corrupted: flash it, or replace the GPU"
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: Problem("gpu-reset-required", Verdict.BAD, "it needs a reset"),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Problem(
        "driver-mismatch", Verdict.BAD,
        "the loaded driver and the installed library have different versions: reboot the node", HOST,
    ),
}  # fmt: skip
NOT_THERE: tuple[int, float] = (pynvml.NVML_ERROR_NOT_SUPPORTED, 0)
# After these errors nothing more can be read from the GPU.
GONE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
# The value does not exist for this GPU, driver or user. That is not worth a finding.
_SILENT = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
    pynvml.NVML_ERROR_NOT_READY,
    pynvml.NVML_ERROR_NO_DATA,
)


def problem_of(error: NvmlError, call: str) -> Problem | None:
    """The problem that an error of `call` means; None if it only means that the value cannot be seen here."""
    if error.value in _SILENT:
        return None
    known: Problem | None = _SPEAKING.get(error.value)
    return known or Problem("nvml-error", Verdict.UNKNOWN, f"{call} failed: {error} (error {error.value})")


def start() -> None:
    """Load the library. Raises NvmlError."""
    pynvml.nvmlInit()


def stop() -> None:
    """Unload the library. Raises NvmlError."""
    pynvml.nvmlShutdown()


def address(handle: Any) -> int:
    """A handle as a number, equal for equal GPUs; 0 for none."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def bus_of(handle: Any) -> str:
    """A GPU's PCI address; "" if it cannot be seen. Raises NvmlError if the GPU is broken."""
    try:
        return str(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    except NvmlError as error:
        if error.value not in _SILENT:
            raise
        return ""


class Gpu:
    """One GPU. `index` is NVML's, as in nvidia-smi; `trace`, if it is a list, collects all answers as
    text."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"gpu{index}"
        self.bus = ""
        self.links = 0
        self.handle: Any = None
        self.trace: list[str] | None = None
        self._constants: dict[str, Any] = {}
        self._request: tuple[Any, Any] = None, None  # handle, array of nvmlFieldValue_t
        self._values: dict[tuple[int, int], tuple[int, float]] = {}  # (field, scope): (error code, value)

    def open(self, fields: Sequence[int], link_fields: Sequence[int]) -> None:
        """Find the GPU, and which of these fields it has; `link_fields` are for each NVLink. Raises
        NvmlError."""
        handle = pynvml.nvmlDeviceGetHandleByIndex(self.index)
        self.bus = bus_of(handle)
        self._want(handle, [(LINK_COUNT, 0)])
        self.read_fields()
        code, number = self._values.get((LINK_COUNT, 0), NOT_THERE)
        self.links = 0 if code else int(number)
        wanted = [(field, 0) for field in fields]
        wanted += [(field, link) for field in link_fields for link in range(self.links)]
        self._want(handle, wanted)
        self.read_fields()
        self._want(handle, [key for key in wanted if self._values.get(key, NOT_THERE)[0] not in _DROPPED])
        self.handle = handle

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call pynvml's function of this name for this GPU. Raises NvmlError."""
        call = getattr(pynvml, function, None)
        try:
            if call is None:
                raise NvmlError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            answer = call(self.handle, *arguments)
        except NvmlError as error:
            self._note(function, "=", error)
            raise
        self._note(function, "=", answer)
        return answer

    def ask_once(self, function: str) -> Any:
        """The same for a value that never changes."""
        if function not in self._constants or self.trace is not None:
            self._constants[function] = self.ask(function)
        return self._constants[function]

    def ask_structure(self, function: str, structure: str) -> Any:
        """The same for a function that fills a structure, whose class in pynvml is `structure`."""
        made = getattr(pynvml, structure, None)
        if made is None:
            raise NvmlError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        answer = made()
        self.ask(function, ctypes.byref(answer))
        self._note(answer)
        return answer

    def read_fields(self) -> None:
        """Read all of this GPU's fields in one call, for `field`. Raises NvmlError."""
        self._values = {}
        # pynvml's own function creates a new array, which takes as long as everything else here together.
        call = getattr(pynvml.nvmlLib, "nvmlDeviceGetFieldValues", None)
        handle, wanted = self._request
        if call is None or not wanted:
            return
        code = call(handle, len(wanted), wanted)
        if code in _SILENT:
            return
        if code:
            raise NvmlError(code)
        for field, scope, kind, code, value in _FIELD_VALUE.iter_unpack(wanted):
            self._values[field, scope] = code, 0 if code else _VALUES[kind].unpack_from(value)[0]

    def _want(self, handle: Any, fields: Sequence[tuple[int, int]]) -> None:
        """Set what `read_fields` reads: (field, scope) each."""
        wanted = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for value, (field, scope) in zip(wanted, fields, strict=True):
            value.fieldId, value.scopeId = field, scope
        self._request = handle, wanted

    def field(self, field: int, scope: int = 0) -> float:
        """The value that `read_fields` read. Raises NvmlError."""
        code, number = self._values.get((field, scope), NOT_THERE)
        if code:
            self._note("field", field, "of", scope, "=", NvmlError(code))
            raise NvmlError(code)
        self._note("field", field, "of", scope, "=", number)
        return number

    def value(self, field: int, function: str, *arguments: Any) -> Any:
        """The field, or if there is none, the answer of `function`. Raises NvmlError."""
        if self._values.get((field, 0), NOT_THERE)[0]:
            return self.ask(function, *arguments)
        return self.field(field)

    def total(self, fields: Sequence[int]) -> float:
        """The sum of these fields over all NVLinks. Raises NvmlError if none can be read."""
        links = range(self.links)
        found = [self._values.get((field, link), NOT_THERE) for field in fields for link in links]
        readable = [number for code, number in found if not code]
        if not readable:
            self._note("fields", fields, "of", self.links, "links: none")
            raise NvmlError(max(found, default=NOT_THERE)[0])
        self._note("fields", fields, "of", self.links, "links =", sum(readable))
        return sum(readable)

    def _note(self, *words: object) -> None:
        if self.trace is not None:
            self.trace.append(" ".join(map(str, words)))
