"""Tell transformers' Auto classes of ours, no sooner than someone asks for them.

Importing transformers takes seconds, and most of `loopwise.hub` does without. So nothing is
imported here: each Auto class is told right after Python has loaded the module that holds it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from loopwise.errors import MissingExtraError
from loopwise.hub.auto.versions import check_version

_AUTO, _OURS = "transformers.models.auto", "loopwise.hub.auto"
# Once the left is loaded, the right is imported; it registers its class as it ends. The model asks
# for what the last one holds, which may itself ask for the Auto classes before it is whole.
WHEN_LOADED = {
    f"{_AUTO}.configuration_auto": f"{_OURS}.config",
    f"{_AUTO}.modeling_auto": f"{_OURS}.model",
    f"{_AUTO}.tokenization_auto": f"{_OURS}.tokenizer",
    "transformers.modeling_layers": f"{_OURS}.model",
}


def register_when_asked() -> None:
    """Register with what is loaded already, and with the rest when it is; twice does no harm."""
    for theirs, ours in WHEN_LOADED.items():
        if theirs in sys.modules:
            _load(ours)
    if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def _load(ours: str) -> None:
    """Import one of our modules, unless this transformers is not one they know: whoever loads it
    may have no need of us. The model waits until both modules it follows are loaded."""
    if ours == f"{_OURS}.model":
        layers = sys.modules.get("transformers.modeling_layers")
        begun = layers is not None and not hasattr(layers, "GradientCheckpointingLayer")
        if begun or f"{_AUTO}.modeling_auto" not in sys.modules:
            return
    try:
        check_version(sys.modules["transformers"].__version__)
    except MissingExtraError as err:
        logging.getLogger(__name__).warning("%s", err)
        return
    importlib.import_module(ours)


class _Watcher(MetaPathFinder):
    """Finds those modules as Python would, and has ours follow once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in WHEN_LOADED:
            return None  # the other finders are asked
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, WHEN_LOADED[fullname])
        return spec


class _Followed(Loader):
    """A loader that loads one of our modules when its own is whole."""

    def __init__(self, inner: Loader, ours: str) -> None:
        self.inner, self.ours = inner, ours

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        _load(self.ours)
