"""Parameters with rows that pad a dimension, so that devices divide it, and without them."""

from typing import Any

import jax

from core.errors import UserError
from core.rules import path_name


def unpad(params: Any, shapes: Any) -> Any:
    """The parameters cut down to the shapes that they have without padding, for an export.

    Args:
      params: arrays, padded at the end of their dimensions.
      shapes: arrays or `ShapeDtypeStruct`s in the same structure.

    Raises:
      UserError: another structure, or a parameter that is smaller than its shape.
    """
    given, wanted = (str(jax.tree.structure(tree)) for tree in (shapes, params))
    if given != wanted:
        raise UserError(
            f"The shapes to cut the parameters to are those of others: {given} instead of {wanted}."
        )

    def cut(path: Any, param: Any, shape: Any) -> Any:
        sizes = zip(param.shape, shape.shape, strict=False)
        if param.ndim != len(shape.shape) or any(n < m for n, m in sizes):
            raise UserError(
                f"{path_name(path)} has the shape {list(param.shape)}, which cannot be cut to "
                f"{list(shape.shape)}."
            )
        return param[tuple(slice(n) for n in shape.shape)]

    return jax.tree_util.tree_map_with_path(cut, params, shapes)
