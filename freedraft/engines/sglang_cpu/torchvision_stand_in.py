"""Stand-in for torchvision if it is not installed.

SGLang imports torchvision at start-up for models with images; PyPI's build of it needs CUDA torch. On the CPU platform,
which serves text only, modules of that name let the imports pass and fail at the first use.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_NAME = "torchvision"


def _stand_in(_: object, name: str) -> type:
    """An attribute of the package, or of one of its names: a stand-in, so that class bodies and defaults evaluate."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name, (), {})


class _Missing(type):
    """Metaclass of stand-ins."""

    __getattr__ = _stand_in

    def __call__(cls, *args: object, **kwargs: object) -> object:
        raise RuntimeError(
            f"{_NAME} ({cls.__name__}) is not installed: the freedraft CPU platform serves text models only"
        )


class _Module(ModuleType):
    __getattr__ = _stand_in


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != _NAME:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        vars(module)["__version__"] = "0.0.0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Make `import torchvision` succeed if it is not installed; no effect if it is."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # last: the real package always wins


def install_without_gpu() -> None:
    """Call `install`, unless there is a GPU: then SGLang itself reports a missing torchvision."""
    if importlib.util.find_spec(_NAME) is not None:
        return
    import torch

    if not torch.cuda.is_available():
        install()
