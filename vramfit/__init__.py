"""VRAMFit: trains language models on the graphics card a person owns. This package is its library.

    import vramfit
    step = vramfit.wrap(model, optimizer)      # precision, accumulation and memory care for your own loop

Nothing heavy is imported until it is used: the panel plans and estimates without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vramfit.engine.accelerators import prepare_allocator as prepare_allocator
    from vramfit.engine.wrap import wrap as wrap

__version__ = "0.1.0"
__all__ = ["__version__", "prepare_allocator", "wrap"]


def __getattr__(name: str) -> Any:
    if name == "wrap":
        from vramfit.engine.wrap import wrap

        return wrap
    if name == "prepare_allocator":
        from vramfit.engine.accelerators import prepare_allocator

        return prepare_allocator
    raise AttributeError(f"module 'vramfit' has no attribute {name!r}")
