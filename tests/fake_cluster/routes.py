"""Paths with places for names, and who answers them."""

import re
from collections.abc import Callable, Sequence

from tests.fake_cluster.errors import ApiError
from tests.fake_cluster.http import Answer, Request

Route = tuple[str, str, Callable[..., Answer]]
"""Method, path with `{}` for each name in it, and what is called with the request and the names."""


def dispatch(routes: Sequence[Route], request: Request, path: str) -> Answer:
    """Answer a request by the first route that has its method and path.

    Raises:
        ApiError: 404 where no route has the path, 405 where none of those that have it has the method.
    """
    known = False
    for method, template, handler in routes:
        names = re.fullmatch(re.escape(template).replace(r"\{\}", "([^/]+)"), path)
        if names and method == request.method:
            return handler(request, *names.groups())
        known = known or names is not None
    raise ApiError(405, "Method Not Allowed") if known else ApiError(404, "404 page not found")
