"""Tracker: a run's own metrics in TensorBoard, in `tensorboard/` of the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurymast.tracker import TrackedRun

try:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as error:
    raise ImportError(f"{error}: pip install tensorboard") from error

FOLDER, PREFIX = "tensorboard", "jurymast/"
EVENTS = f"{PREFIX}incidents"


def tracker(run: TrackedRun) -> TensorBoard:
    return TensorBoard(str(run.directory / FOLDER))


class TensorBoard:
    def __init__(self, folder: str) -> None:
        self._writer = EventFileWriter(folder)

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._add(step, at, [Summary.Value(tag=PREFIX + name, simple_value=v) for name, v in values.items()])

    def event(self, step: int, at: float, text: str) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add(step, at, [Summary.Value(tag=EVENTS, metadata=about, tensor=tensor)])

    def _add(self, step: int, at: float, values: list[Any]) -> None:
        self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
