"""Lets the real torchvision be imported beside torch's CPU build.

PyPI's wheel is linked to torch's CUDA build, so its own operators are missing beside a CPU torch, and
importing it fails where it registers their fake versions. This package declares the names, then becomes the
real one.
"""

import importlib.machinery
import re
import sys
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent.parent


def _real_spec() -> importlib.machinery.ModuleSpec:
    places = [p for p in sys.path if Path(p or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("torchvision", places)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("torchvision is not installed: pip install -r requirements-sglang-cpu.txt")
    return spec


def _declare_operators(folder: Path) -> torch.library.Library:
    source = (folder / "_meta_registrations.py").read_text(encoding="utf-8")
    library = torch.library.Library("torchvision", "DEF")
    for name in set(re.findall(r'register_meta\("(\w+)"\)|torchvision::(\w+)', source)):
        library.define(f"{''.join(name)}(Tensor x) -> Tensor")
    return library


_spec = _real_spec()
_library = _declare_operators(Path(_spec.submodule_search_locations[0]))
_module = sys.modules[__name__]
_module.__spec__, _module.__path__ = _spec, _spec.submodule_search_locations
_module.__file__, _module.__loader__ = _spec.origin, _spec.loader
_spec.loader.exec_module(_module)
