"""numpy, imported when it is first used: that takes 0.1 s, and most commands need none of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
else:

    class _Numpy:
        """Stands for numpy, and has its names once it was asked for one."""

        def __getattr__(self, name: str) -> Any:
            import numpy

            # the dict of the module itself: no later look-up comes here, and none is out of date
            self.__dict__ = vars(numpy)
            return getattr(numpy, name)

    np = _Numpy()

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""An array of any type and shape."""

__all__ = ["Array", "np"]
