"""safetensors files of any content, sound or not, without torch."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1}


def write_file(path: Path, tensors: dict[str, tuple[str, list[int]]], **entries: object) -> Path:
    """A file of zeros: name -> (dtype, shape). `entries` replace what the header says of a tensor."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps({**header, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path
