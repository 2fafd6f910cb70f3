"""torch's compiler is imported when something is compiled, not before.

torchvision, timm and every optimiser of torch import `torch._dynamo`, and with it triton and sympy: 150 MB and seconds,
of which they only use functions that do nothing as long as nothing is compiled. A module with these functions stands in
its place until anything else of it is used. Only the `branchout` command does this: in Python, how torch is imported is
the caller's business.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_lock = threading.Lock()
NAME = "torch._dynamo"
UTILS = f"{NAME}.utils"


def import_when_used() -> None:
    """Defer the import of `torch._dynamo`, unless it has been imported. torch itself need not be imported yet."""
    if NAME not in sys.modules:
        for name in (NAME, UTILS):
            sys.modules[name] = Deferred(name)
        sys.meta_path.insert(0, _finder)


def deferred() -> bool:
    return isinstance(sys.modules.get(NAME), Deferred)


def load() -> ModuleType:
    """The real `torch._dynamo`."""
    with _lock:
        if deferred():
            sys.meta_path.remove(_finder)
            for name in (NAME, UTILS):
                del sys.modules[name]
    return importlib.import_module(NAME)


class Deferred(ModuleType):
    """What stands for `torch._dynamo`, and for its module `utils`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # `importlib.util.find_spec` asks for it
        if name == NAME:
            self.__path__: list[str] = []  # it is a package
            self.disable, self.graph_break = disable, graph_break
        else:
            self.is_compile_supported = is_compile_supported

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # asked by inspect and others for any module
            raise AttributeError(attribute)
        load()
        return getattr(importlib.import_module(self.__name__), attribute)


def disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
    """As `torch._dynamo.disable`: a function that is not compiled."""
    if fn is None or not callable(fn) or isinstance(fn, type):
        return load().disable(fn, recursive, **options)
    compiled_apart = functools.cache(lambda: load().disable(fn, recursive, **options))

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs) if deferred() else compiled_apart()(*args, **kwargs)

    return call


def graph_break(*args: Any, **options: Any) -> None:
    if not deferred():
        load().graph_break(*args, **options)


def is_compile_supported(device: str) -> Any:
    load()
    return importlib.import_module(UTILS).is_compile_supported(device)


class Finder:
    """Imports the real package when one of its other modules is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{NAME}."):
            return None
        load()
        return ModuleSpec(name, Loaded())  # type: ignore[arg-type]


class Loaded:
    """A loader of a module that has been imported."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import has replaced it


_finder = Finder()
