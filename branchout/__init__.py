"""Branchout adds classes to a trained image classifier without making it forget the old ones.

>>> import branchout
>>> base = branchout.load("base/")
>>> model = base.extend("new_photos/", memory="old_photos/", out="v2/")
>>> model.predict("robin.jpg")
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["BranchoutError", "Model", "as_samples", "load", "pretrain"]

if TYPE_CHECKING:
    from branchout.api import Model, as_samples, load, pretrain
    from branchout.errors import BranchoutError


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used, so that `branchout --help` need not wait for torch."""
    if name == "BranchoutError":
        from branchout.errors import BranchoutError

        return BranchoutError
    if name in __all__:
        from branchout import api

        return getattr(api, name)
    raise AttributeError(f"module 'branchout' has no attribute {name!r}")
